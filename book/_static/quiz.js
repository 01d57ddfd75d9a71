// Quizzes: a button and a line of feedback for each question. The explanations are those of the fold-out below it.
"use strict";
(() => {
  for (const question of document.querySelectorAll(".quiz-question")) {
    const answers = question.querySelector(".quiz-answer");
    const field = question.querySelector("input[type=text]");
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: "Check", className: "quiz-check" });
    const say = Object.assign(document.createElement("p"), { className: "quiz-say" });
    say.setAttribute("role", "status");
    say.setAttribute("aria-live", "polite");
    answers.before(button, say);

    const tell = (verdict, item) => {
      say.className = `quiz-say quiz-${verdict}`;
      const word = document.createElement("strong");
      word.textContent = { right: "✓ Right. ", wrong: "✗ Not yet. ", none: "" }[verdict];
      say.replaceChildren(word, typeof item === "string" ? item : item.querySelector(".quiz-why").cloneNode(true));
    };
    const chosen = () => {
      const option = question.querySelector("input[type=radio]:checked");
      return option && answers.querySelector(`[data-option="${option.value}"]`);
    };
    const near = (value, wanted, tolerance) => Math.abs(value - Number(wanted)) <= tolerance + 1e-12;
    button.addEventListener("click", () => {
      if (!field) {
        const item = chosen();
        if (!item) return tell("none", "Choose an answer first.");
        return tell(item.hasAttribute("data-right") ? "right" : "wrong", item);
      }
      const text = field.value.trim().replace(",", ".");
      const value = Number(text);
      if (!text || !Number.isFinite(value)) return tell("none", "Write a number, such as 0.25.");
      const tolerance = Number(question.dataset.tolerance);
      if (near(value, question.dataset.answer, tolerance)) return tell("right", answers.querySelector("[data-right]"));
      const known = [...answers.querySelectorAll("[data-value]")].find((item) => near(value, item.dataset.value, tolerance));
      return tell("wrong", known ?? "Try again, or open the answer below.");
    });
    field?.addEventListener("keydown", (event) => {
      if (event.key === "Enter") { event.preventDefault(); button.click(); }
    });
  }
})();
