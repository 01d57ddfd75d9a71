"""Sphinx extension: ``{quiz} part`` shows the questions of that part from book/teaching/quizzes.yml.

The page works without a server. With JavaScript (``_static/quiz.js``) an answer is checked and the explanation of the
chosen option appears; without it the answers are in a fold-out below each question. Texts are MyST, so that they can hold
formulas and links to lessons.
"""

import html
from pathlib import Path
from typing import Any

import yaml
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

SOURCE = Path(__file__).resolve().parent.parent / "teaching" / "quizzes.yml"


def raw(text: str) -> nodes.raw:
    return nodes.raw("", text, format="html")


class Quiz(SphinxDirective):
    """All questions of one part."""

    required_arguments = 1

    def inline(self, text: str) -> nodes.inline:
        """One line of MyST, parsed."""
        children, _ = self.state.inline_text(" ".join(text.split()), self.lineno)
        return nodes.inline("", "", *children)

    def run(self) -> list[nodes.Node]:
        part = self.arguments[0]
        self.env.note_dependency(str(SOURCE))
        quizzes = yaml.safe_load(SOURCE.read_text("utf8"))
        if part not in quizzes:
            raise self.error(f"quiz {part}: must be one of {', '.join(quizzes)}")
        found: list[nodes.Node] = [raw('<div class="quiz">')]
        for number, question in enumerate(quizzes[part], 1):
            found += self.question(f"{part}-{number}", number, question)
        return [*found, raw("</div>")]

    def question(self, name: str, number: int, question: dict) -> list[nodes.Node]:
        """A fieldset: the question, its options or a field for a number, and the explanations."""
        numeric = "answer" in question
        data = f' data-answer="{question["answer"]}" data-tolerance="{question["tolerance"]}"' if numeric else ""
        found = [raw(f'<fieldset class="quiz-question" id="quiz-{html.escape(name)}"{data}><legend>{number}. ')]
        found += [self.inline(question["question"]), raw("</legend>")]
        if numeric:
            found.append(
                raw('<label>Your number <input type="text" inputmode="decimal" autocomplete="off" size="10"></label>')
            )
        for i, option in enumerate(question.get("options", [])):
            found.append(raw(f'<label><input type="radio" name="quiz-{name}" value="{i}"><span>'))
            found += [self.inline(option["text"]), raw("</span></label>")]
        found.append(raw('<details class="quiz-answer"><summary>Answer, explained</summary><ul>'))
        if numeric:
            found.append(raw(f'<li data-right><strong>{question["answer"]}</strong>. <span class="quiz-why">'))
            found += [self.inline(question["why"]), raw("</span></li>")]
        for i, option in enumerate(question.get("options", question.get("mistakes", []))):
            right = " data-right" if option.get("right") else ""
            verdict = "Right" if right else "Wrong"
            value = f' data-value="{option["value"]}"' if numeric else ""
            found.append(raw(f'<li data-option="{i}"{right}{value}><strong>{verdict}:</strong> '))
            found.append(nodes.inline("", f"{option['value']}.") if numeric else self.inline(option["text"]))
            found += [raw(' <span class="quiz-why">'), self.inline(option["why"]), raw("</span></li>")]
        return [*found, raw("</ul></details></fieldset>")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("quiz", Quiz)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
