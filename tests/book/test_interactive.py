"""The Lipschitz explorer and the equilibrium player in headless Chromium, without the built book.

The raw html blocks of the two pages are put into a bare page beside the scripts of ``book/_static``. Skipped, with
the reason, where there is no Chromium; a failure instead if LIPMDEQ_REQUIRE_BROWSER is set.
"""

import json
import math
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lipmdeq import bounds
from lipmdeq.bounds import ABLATIONS, READINGS, LipschitzSpec, PotentialSpec, feasible, steps

BOOK = Path(__file__).resolve().parents[2] / "book"
sys.path.insert(0, str(BOOK / "_ext"))

import interactive  # noqa: E402

LESSONS = {"01_banach": "player", "05_solvers": "player", "11_composition": "explorer", "12_bound": "explorer"}
FIELDS = ("a", "c", "gamma", "alpha1", "alpha2", "n", "p")


def harness(name: str) -> str:
    """A bare page from the raw html blocks and the "Set it" buttons of ``book/<name>.md``."""
    text = (BOOK / f"{name}.md").read_text("utf8")
    blocks = re.findall(r"^```\{raw\} html\n(.*?)^```$", text, re.M | re.S)
    buttons = re.findall(r"<button[^>]*data-try.*?</button>", text)
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title><body>'
    return head + "\n".join(blocks + buttons) + "</body></html>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("interactive")
    shutil.copytree(BOOK / "_static", root / "_static")
    (root / "book").mkdir()
    for name in ("explorer", "player"):
        (root / "book" / f"{name}.html").write_text(harness(name), "utf8")
    return root / "book"


@pytest.fixture
def visit(browser, folder):
    """Opens ``<name>.html<hash>``; fails at the end if the page complained or asked for anything outside."""
    opened, complaints = [], []

    def open_page(name: str, link: str = "", **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        opened.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda m: m.type == "error" and complaints.append(m.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda r: r.url.startswith("file:") or complaints.append(f"outside: {r.url}"))
        page.goto((folder / f"{name}.html").as_uri() + link)
        page.wait_for_selector(".lip-app:not([hidden])")
        return page

    yield open_page
    for context in opened:
        context.close()
    assert not complaints


@pytest.fixture(scope="module")
def compute_page(browser, folder):
    """One tab for each page, for tests that only compute."""
    tabs = {}

    def tab(name: str):
        if name not in tabs:
            tabs[name] = browser.new_page()
            tabs[name].goto((folder / f"{name}.html").as_uri())
            tabs[name].wait_for_selector(".lip-app:not([hidden])")
        return tabs[name]

    return tab


# ---- explorer: the numbers


def settings(count: int, seed: int) -> list[dict]:
    """Random settings within the sliders, every fourth at an edge, half of them with a change undone."""
    draw = random.Random(seed)
    found = []
    for i in range(count):
        s = {
            "a": draw.uniform(0.01, 1),
            "c": math.exp(draw.uniform(math.log(0.1), math.log(4))),
            "gamma": draw.uniform(0.1, 2),
            "alpha1": draw.uniform(0.01, 0.99),
            "alpha2": draw.uniform(0.01, 0.99),
            "n": draw.randint(1, 8),
            "p": draw.uniform(0, 0.9),
            "post_affine": draw.random() < 0.7,
            "tol": 10 ** draw.uniform(-8, -1),
            "undo": "none" if i % 2 else draw.choice(ABLATIONS),
        }
        if i % 4 == 0:
            edges = [{"a": 1.0, "c": 4.0}, {"a": 0.01, "c": 0.1, "gamma": 0.1}, {"alpha2": 0.01}, {"p": 0.0}]
            s |= draw.choice([*edges, {"alpha2": 0.99, "gamma": 2.0, "n": 8}, {"n": 1}])
        found.append(s)
    return found


@pytest.mark.browser
def test_numbers_equal_those_of_python(compute_page):
    page = compute_page("explorer")
    chosen = settings(300, seed=7)
    # JSON has no infinity, so it travels as text
    script = """list => list.map(s => JSON.parse(JSON.stringify(window.lipExplorer.compute(s),
        (key, value) => value === Infinity ? 'inf' : value)))"""
    compared = 0
    for s, seen in zip(chosen, page.evaluate(script, chosen), strict=True):
        spec = LipschitzSpec(**{key: s[key] for key in (*FIELDS, "post_affine")})
        for mode in ("train", "test"):
            train = mode == "train"
            ops = spec.operations(train) if s["undo"] == "none" else spec.ablation(s["undo"], train=train)
            assert float(seen["L_hat"][mode]) == pytest.approx(ops.L_hat, rel=1e-9), s
            terms = [float(x) for x in seen["terms"][mode].values()]
            assert sum(terms) == pytest.approx(ops.L_hat, rel=1e-9), s
            for reading in READINGS:
                L = ops.L(reading)
                assert float(seen["L"][mode][reading]) == pytest.approx(L, rel=1e-9), (s, mode, reading)
                assert seen["steps"][mode][reading] == steps(L, s["tol"]), (s, mode, reading)
            compared += len(READINGS)
        assert float(seen["L_bar"]) == pytest.approx(ops.L_bar, rel=1e-9)
        for reading, norm in seen["norm"].items():
            product = ops.L_hat * float(norm) * ops.L_bar
            assert math.isinf(product) or product == pytest.approx(float(seen["L"]["test"][reading]), rel=1e-9)
        for up in ("printed", "full"):
            M = [[float(x) for x in row] for row in seen["M"][up]]
            assert M == [pytest.approx(list(row), rel=1e-9) for row in ops.fusion_matrix(up)]
        if s["undo"] == "none":
            # D solves an eigenvalue problem: its digits are fewer than those of L, which is stationary in D
            assert seen["D"] == pytest.approx(list(spec.D), rel=1e-5), s
            L2 = {mode: steps(spec.L("perron", mode == "train"), s["tol"], seen["cond_D"]) for mode in seen["L"]}
            assert seen["steps_l2"] == L2
    assert compared == 300 * 2 * len(READINGS)


@pytest.mark.browser
def test_golden_numbers(compute_page):
    """The table of the review: as printed, as reported, spectral, Perron."""
    page = compute_page("explorer")
    golden = {
        (0.1, 0.3): (0.0252, 0.0297, 0.0267, 0.0232),
        (0.35, 0.3): (0.5947, 0.6993, 0.6424, 0.5917),
        (0.4, 0.3): (0.8543, 1.0035, 0.9255, 0.8611),
        (1.0, 0.3): (12.765, 14.427, 13.641, 13.276),
        (0.1, 0.0): (0.0224, 0.0264, 0.0238, 0.0206),
        (0.4, 0.0): (0.6760, 0.7940, 0.7323, 0.6814),
    }
    for (a, p), values in golden.items():
        seen = page.evaluate("s => window.lipExplorer.compute(s).L.train", {"a": a, "p": p})
        assert [seen[name] for name in READINGS] == pytest.approx(values, abs=6e-5, rel=5e-5)


@pytest.mark.browser
def test_every_ablation_can_be_chosen(visit):
    """The list "undo" offers each row of Python under its own name, and Python code that gives the number shown."""
    page = visit("explorer")
    offered = page.eval_on_selector_all("[data-part=undo] option", "nodes => nodes.map(n => n.value)")
    assert offered == ["none", *ABLATIONS]
    shown = {}
    for row in ABLATIONS:
        page.select_option("[data-part=undo]", row)
        assert f'.ablation("{row}")' in page.locator("[data-part=python]").text_content()
        shown[row] = page.evaluate("lipExplorer.compute(lipExplorer.state).L.train.perron")
    assert shown == pytest.approx({row: LipschitzSpec().ablation(row).L() for row in ABLATIONS}, rel=1e-9)


@pytest.mark.browser
@pytest.mark.parametrize("field", ["a", "c", "gamma", "alpha1", "alpha2", "p"])
def test_certified_range_equals_that_of_python(compute_page, field):
    page = compute_page("explorer")
    limits = page.evaluate("f => lipExplorer.FIELDS.find(({name}) => name === f)", field)
    low, high = limits["min"], limits["max"]
    for s in settings(3, seed=ord(field[-1])):
        values = {key: s[key] for key in FIELDS}
        for reading in ("reported", "perron"):
            args = [values, field, reading, "train", low, high]
            seen = page.evaluate("args => lipExplorer.feasible(...args)", args)
            found = feasible(LipschitzSpec(**values), field, reading=reading)
            if found is None or found[1] < low or found[0] > high:
                assert seen is None, (s, reading)
            else:
                assert seen == pytest.approx([max(found[0], low), min(found[1], high)], abs=1e-8), (s, reading)


@pytest.mark.browser
def test_bad_input_is_refused(compute_page):
    page = compute_page("explorer")
    tell = "s => { try { lipExplorer.compute(s); return 'taken'; } catch (error) { return error.message; } }"
    assert page.evaluate(tell, {"a": 7}) == "a = 7: must be in (0, 1]"
    for bad in ({"n": 2.5}, {"p": 1}, {"alpha1": 0}, {"c": -1}, {"gamma": None}, {"undo": "S9"}, {"tol": 0}):
        assert "must be" in page.evaluate(tell, bad), bad


@pytest.mark.browser
def test_certified_family_equals_python(compute_page):
    page = compute_page("explorer")
    draw = random.Random(11)
    chosen = [{"tau": draw.uniform(0.01, 0.99), "tol": 10 ** draw.uniform(-8, -1)} for _ in range(100)]
    chosen += [{"tau": tau, "tol": tol} for tau in (0.01, 0.9, 0.99, 0.999999) for tol in (0.1, 1e-8)]
    for s, seen in zip(chosen, page.evaluate("list => list.map(s => lipExplorer.potential(s))", chosen), strict=True):
        spec = PotentialSpec(s["tau"])
        assert seen["L"] == pytest.approx(spec.L(), rel=1e-9) == pytest.approx(spec.L(train=False), rel=1e-9)
        assert seen["steps"] == spec.steps(s["tol"]), s
        assert seen["error_factor"] == pytest.approx(spec.error_factor, rel=1e-9), s
    assert page.evaluate("lipExplorer.potential().L") == PotentialSpec().tau
    tell = "s => { try { lipExplorer.potential(s); return 'taken'; } catch (error) { return error.message; } }"
    assert page.evaluate(tell, {"tau": 1}) == "tau = 1: must be in (0, 1)"
    for bad in ({"tau": 0}, {"tau": "0.5"}, {"tau": None}, {"tol": 0}):
        assert "must be" in page.evaluate(tell, bad), bad


# ---- explorer: the page


def card(page, reading: str) -> str:
    return page.locator(f"[data-card={reading}] b").inner_text()


def cell(page, kind: str, which: str) -> str:
    return page.locator(f'[data-{kind}="{which}"]').inner_text()


@pytest.mark.browser
def test_slider_changes_what_is_shown(visit):
    page = visit("explorer")
    assert (card(page, "reported"), card(page, "perron")) == ("1.0035", "0.8611")
    slider = page.get_by_role("slider", name="a slope of the activation")
    slider.focus()
    for _ in range(5):
        page.keyboard.press("ArrowLeft")
    assert slider.input_value() == "0.35"
    assert page.locator("[data-number=a]").input_value() == "0.35"
    assert card(page, "reported") == "0.6993"
    assert cell(page, "value", "test-perron") == f"{LipschitzSpec(a=0.35).L('perron', train=False):.4g}"
    assert cell(page, "steps", "train-perron") == str(steps(LipschitzSpec(a=0.35).L()))
    page.wait_for_function("document.querySelector('[aria-live]').textContent.includes('0.5917, contraction')")
    page.wait_for_function("document.querySelector('#lip-desc').textContent.includes('a = 0.35')")


@pytest.mark.browser
def test_number_is_taken_or_refused(visit):
    page = visit("explorer")
    number = page.locator("[data-number=c]")
    number.fill("1.234")
    assert page.evaluate("lipExplorer.state.c") == 1.234
    assert card(page, "spectral") == f"{LipschitzSpec(c=1.234).L('spectral'):.4g}"
    number.fill("7")
    assert number.get_attribute("aria-invalid") == "true"
    number.blur()
    assert number.input_value() == "1.234"
    assert "c = 7: must be in [0.1, 4]" in page.locator("[aria-live]").inner_text()
    assert page.evaluate("lipExplorer.state.c") == 1.234


@pytest.mark.browser
def test_permalink_round_trip(visit):
    first = visit("explorer")
    assert first.evaluate("location.hash") == "", "the address is clean until something changes"
    first.locator("[data-number=gamma]").fill("1.17")
    first.locator("[data-number=n]").fill("6")
    first.select_option("[data-part=undo]", "S5")
    first.select_option("[data-part=tol]", "0.000001")
    first.select_option("[data-part=x]", "alpha1")
    first.check("[data-part=log]")
    first.uncheck("[data-part=post]")
    first.check("input[name=lip-mode][value=test]")
    link, state = first.evaluate("[location.hash, lipExplorer.state]")
    second = visit("explorer", link)
    assert second.evaluate("lipExplorer.state") == state
    assert second.evaluate("location.hash") == link
    assert card(second, "perron") == card(first, "perron")
    first.click("[data-part=reset]")
    assert first.evaluate("lipExplorer.state") == visit("explorer").evaluate("lipExplorer.state")


@pytest.mark.browser
def test_certified_family_on_the_page(visit, capsys):
    """The block is chosen, tau moved, the numbers are those of Python; the paper's controls are gone and come back."""
    page = visit("explorer")
    page.select_option("[data-part=block]", "potential")
    slider = page.get_by_role("slider")
    assert slider.count() == 1, "the other parameters do not enter"
    slider.focus()
    page.keyboard.press("ArrowRight")
    page.select_option("[data-part=tol]", "0.000001")
    spec = PotentialSpec(0.91)
    assert card(page, "tau") == "0.9100"
    assert card(page, "tau-steps") == str(spec.steps(1e-6))
    assert card(page, "tau-factor") == f"≤ {spec.error_factor:.4g}"
    counts = page.locator("[data-part=tau-steps] tbody td").all_inner_texts()
    assert counts == [str(spec.steps(tol)) for tol in (1e-1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8)]
    exec(page.locator("[data-part=python]").text_content(), {})
    assert capsys.readouterr().out.split() == [str(x) for x in (0.91, spec.steps(1e-6), spec.error_factor)]
    page.wait_for_function("document.querySelector('[aria-live]').textContent.includes('L = 0.9100 in both modes')")
    link, state = page.evaluate("[location.hash, lipExplorer.state]")
    assert link == "#block=potential&tau=0.91&tol=0.000001"
    assert visit("explorer", link).evaluate("lipExplorer.state") == state
    page.wait_for_selector("[data-part=tau-plot] svg")
    box = page.locator("[data-part=tau-plot] svg").bounding_box()
    page.locator("[data-part=tau-plot] svg").click(position={"x": 52 + (box["width"] - 66) / 2, "y": 50})
    assert page.evaluate("lipExplorer.state.tau") == pytest.approx(0.5, abs=0.011)
    page.select_option("[data-part=block]", "paper")
    assert page.get_by_role("slider").count() == len(FIELDS)
    assert (card(page, "reported"), card(page, "perron")) == ("1.0035", "0.8611")
    assert "tau" not in page.evaluate("location.hash")


@pytest.mark.browser
@pytest.mark.parametrize("link", ["#block=constructor&tau=2", "#block=potential&tau=", "#block=potential&tau=x"])
def test_broken_link_to_the_certified_family(visit, link):
    state = visit("explorer", link).evaluate("lipExplorer.state")
    assert state["tau"] == 0.9 and state["block"] == ("paper" if "constructor" in link else "potential")


@pytest.mark.browser
def test_broken_link_falls_back_to_defaults(visit):
    page = visit("explorer", "#a=9&n=2.5&c=&undo=constructor&constructor=1&mode=x&x=__proto__&p=0.1&tol=5")
    state = page.evaluate("lipExplorer.state")
    assert state == {**page.evaluate("lipExplorer.DEFAULTS"), "p": 0.1, "x": "a", "y": "linear", "mode": "train"}


@pytest.mark.browser
def test_presets_are_the_rows_of_the_paper(visit):
    """Where the paper states L, the reported reading gives it after rounding; the text's example does not."""
    page = visit("explorer")
    presets = page.evaluate("lipExplorer.PRESETS")
    groups = [preset["group"] for preset in presets]
    assert [sum(g.startswith(f"Table {k}") for g in groups) for k in (1, 2, 3)] == [7, 12, 5]
    off = []
    for index, preset in enumerate(presets):
        page.select_option("[data-part=preset]", str(index))
        state = page.evaluate("lipExplorer.state")
        assert all(state[key] == value for key, value in preset["values"].items())
        if preset["paper"] is None:
            continue
        assert f"The paper states L = {preset['paper']:g}" in page.locator("[data-part=note]").inner_text()
        L = LipschitzSpec(**{key: state[key] for key in FIELDS}).L("reported")
        digits = {14.43: 2, 1.0: 1, 0.03: 2, 0.794: 3, 0.026: 3, 0.86: 2}[preset["paper"]]
        if round(L, digits) != preset["paper"]:
            off.append(preset["label"])
    assert off == ["Section 3: example, a = 0.35"]


@pytest.mark.browser
@pytest.mark.parametrize("n", [1, 8])
def test_matrix_is_shown(visit, n):
    page = visit("explorer", f"#n={n}")
    cells = page.locator(".lip-matrix tbody td")
    assert cells.count() == n * n
    M = LipschitzSpec(n=n).fusion_matrix().ravel()
    assert [float(text) for text in cells.all_inner_texts()] == pytest.approx(list(M), rel=0.25, abs=0.006)


@pytest.mark.browser
def test_what_to_try_on_the_explorer_is_true(visit):
    page = visit("explorer")
    text = (BOOK / "explorer.md").read_text("utf8")
    stated = {  # the setting of each button: numbers that the text beside it promises
        "a=0.4": [("train-reported", "1.0035"), ("train-perron", ".8611")],
        "a=0.4&mode=test": [("test-perron", ".6814")],
        "a=0.35": [("train-reported", ".6993")],
        "a=1&x=c": [("train-reported", "14.43"), ("reported", ".7492"), ("perron", ".8662")],
        "a=0.4&x=alpha2": [("reported", ".057"), ("reported", ".2954")],
        "a=0.4&x=n": [("reported", "1, 2, 3"), ("perron", "all")],
        "block=potential&tau=0.9": [],
    }
    assert re.findall(r'data-try="([^"]*)"', text) == list(stated)
    items = re.split(r"^\d\. ", text.split("## What to try")[1], flags=re.M)[1:]
    for (link, promises), item in zip(stated.items(), items, strict=True):
        page.locator(f'[data-try="{link}"]').click()
        page.wait_for_function("link => location.hash.length > link.length", arg=link)
        page.wait_for_function("document.querySelector('[data-range=perron]').textContent !== ''")
        for where, number in promises:
            assert number in item, (link, number)
            assert number in cell(page, "value" if "-" in where else "range", where), (link, where)
    assert (steps(LipschitzSpec().L()), steps(LipschitzSpec().L(train=False))) == (51, 20)
    assert (card(page, "tau-steps"), card(page, "tau-factor")) == ("72", "≤ 10.00")
    told = " ".join(items[-1].split())
    for tau, promise in (
        (".9", "72 steps to $10^{-3}$ and an error of at most 10 residuals"),
        (".99", "756 steps and 100 residuals"),
    ):
        spec = PotentialSpec(float(tau))
        assert f"$\\tau = {tau}$" in told and promise in told
        assert promise.startswith(f"{spec.steps()} ") and f"{spec.error_factor:.0f} residuals" in promise
    for n, reported, perron in ((4, 1.003, 0.8611), (8, 1.272, 0.9007)):
        seen = page.evaluate("n => lipExplorer.compute({n}).L.train", n)
        assert (round(seen["reported"], 3), round(seen["perron"], 4)) == (reported, perron)


# ---- both pages: who reads, and on what


@pytest.mark.browser
@pytest.mark.parametrize("name", ["explorer", "player"])
@pytest.mark.parametrize("link", ["", "#n=8&undo=S2&scale=2&angle=45", "#block=potential&tau=0.99&tol=1e-8"])
def test_no_sideways_scrolling_on_a_phone(visit, name, link):
    page = visit(name, link, viewport={"width": 390, "height": 844})
    page.wait_for_selector(".lip-app svg[role=img]")
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 390


@pytest.mark.browser
@pytest.mark.parametrize(("name", "link"), [("explorer", ""), ("explorer", "#block=potential&tau=0.9"), ("player", "")])
def test_everything_has_a_name(visit, name, link):
    """Each control has an accessible name, each drawing a title and a description, each id is unique."""
    page = visit(name, link)
    page.wait_for_selector(".lip-app svg[role=img]")
    nameless = page.eval_on_selector_all(
        ".lip-app :is(input, select, button, [tabindex])",
        """nodes => nodes.filter(n => !(n.labels?.length || n.ariaLabel || n.textContent.trim()))
                         .map(n => n.outerHTML)""",
    )
    assert not nameless
    drawings = page.eval_on_selector_all(
        ".lip-app svg:not([aria-hidden])",
        "nodes => nodes.filter(n => !n.parentElement.closest('svg')).map(n => n.getAttribute('aria-labelledby'))",
    )
    assert drawings
    for ids in drawings:
        for found in ids.split():
            assert len(page.locator(f"#{found}").text_content()) > 10
    ids = page.eval_on_selector_all("[id]", "nodes => nodes.map(n => n.id)")
    assert len(ids) == len(set(ids))
    assert page.locator("[aria-live=polite]").count() == 1


# ---- player


def run(page, **params) -> dict:
    return page.evaluate("p => window.eqPlayer.run(p)", params)


@pytest.mark.browser
def test_picard_keeps_banachs_promise(compute_page):
    """On a contraction: steps within the bound, residuals below L^k r_0, one fixed point that attracts."""
    page = compute_page("player")
    draw = random.Random(3)
    for _ in range(60):
        stretch = draw.uniform(1, 1.3)
        params = {
            "stretch": stretch,
            "scale": draw.uniform(0, 0.93) / stretch,
            "angle": draw.uniform(-180, 180),
            "bend": draw.choice([0, 1, draw.random()]),
            "x": draw.uniform(-4, 4),
            "y": draw.uniform(-4, 4),
            "m": draw.randint(1, 3),
        }
        seen = run(page, **params)
        L, picard = seen["L"], seen["picard"]
        assert L == pytest.approx(params["scale"] * stretch)
        assert picard["outcome"] == "converged"
        assert picard["steps"] <= seen["bound"], params
        assert picard["evaluations"] == picard["steps"] + 1 == len(picard["residuals"])
        first = picard["residuals"][0]
        assert all(r <= L**k * first * (1 + 1e-9) for k, r in enumerate(picard["residuals"]))
        (fixed,) = seen["fixed"]
        assert fixed["radius"] <= fixed["norm"] + 1e-12 and fixed["norm"] <= L + 1e-12
        error = math.dist(picard["points"][-1], fixed["z"])
        assert error <= picard["residuals"][-1] / (1 - L) * (1 + 1e-6) + 1e-12  # a posteriori
        assert seen["anderson"]["outcome"] == "converged"


@pytest.mark.browser
def test_picard_fails_on_a_rotation_without_contraction(compute_page):
    page = compute_page("player")
    for scale in (1, 1.1, 1.5):
        for angle in (45, 90, 180):
            seen = run(page, scale=scale, angle=angle, bend=0)
            assert seen["bound"] is None
            assert seen["picard"]["outcome"] in ("not converged", "diverged")
            # a linear map of the plane: three evaluations tell all
            assert seen["anderson"]["outcome"] == "converged"
            assert seen["anderson"]["evaluations"] <= 5


@pytest.mark.browser
def test_anderson_with_one_evaluation_is_picard(compute_page):
    page = compute_page("player")
    seen = run(page, m=1)
    assert seen["anderson"]["points"] == seen["picard"]["points"]


@pytest.mark.browser
def test_jacobian_at_the_fixed_point(compute_page):
    """Norm and spectral radius on display against finite differences of f."""
    import numpy as np

    page = compute_page("player")
    params = {"scale": 0.9, "angle": 35, "stretch": 1.4, "bend": 0.7}
    fixed = run(page, **params)["fixed"][0]
    f = "([p, z]) => eqPlayer.map({...eqPlayer.DEFAULTS, ...p})(z)"
    z, h = np.array(fixed["z"]), 1e-6
    columns = [
        np.subtract(page.evaluate(f, [params, list(z + h * e)]), page.evaluate(f, [params, list(z - h * e)]))
        for e in np.eye(2)
    ]
    J = np.column_stack(columns) / (2 * h)
    assert fixed["norm"] == pytest.approx(np.linalg.norm(J, 2), rel=1e-6)
    assert fixed["radius"] == pytest.approx(max(abs(np.linalg.eigvals(J))), rel=1e-6)


@pytest.mark.browser
def test_what_to_try_on_the_player_is_true(visit):
    page = visit("player")
    text = (BOOK / "player.md").read_text("utf8")
    outcomes = {  # setting: evaluations and outcome of Picard and of Anderson
        "bend=0": (65, "converged", 4, "converged"),
        "bend=0.5": (26, "converged", 9, "converged"),
        "scale=1&angle=90&bend=0": (300, "not converged", 4, "converged"),
        "scale=0.8&angle=90&stretch=1.5&bend=0": (50, "converged", 4, "converged"),
        "scale=2&angle=0&bend=1": (9, "converged", 22, "converged"),
        "scale=1&angle=0&bend=0": (300, "not converged", 300, "not converged"),
    }
    assert re.findall(r'data-try="([^"]*)"', text) == list(outcomes)
    for link, (picard, how, anderson, how_too) in outcomes.items():
        page.evaluate("location.hash = ''")
        page.locator(f'[data-try="{link}"]').click()
        page.wait_for_function(
            "want => want.every(([part, text]) => document.querySelector(`[data-part=${part}]`).textContent === text)",
            arg=[
                ["picard-count", str(picard)],
                ["picard-outcome", how],
                ["anderson-count", str(anderson)],
                ["anderson-outcome", how_too],
            ],
        )
    assert run(page, bend=0)["bound"] == run(page, bend=0.5)["bound"] == 64
    assert run(page, bend=0.5)["fixed"][0]["radius"] == pytest.approx(0.657, abs=5e-4)
    assert run(page, scale=1, angle=90, bend=0, m=2)["anderson"]["evaluations"] == 63
    stretched = run(page, scale=0.8, angle=90, stretch=1.5, bend=0)
    assert (stretched["L"], stretched["fixed"][0]["radius"]) == pytest.approx((1.2, 0.8))
    several = [run(page, scale=2, angle=0, bend=1, y=y) for y in (2.5, -2.5)]
    assert [len(seen["fixed"]) for seen in several] == [3, 3]
    assert sum(fixed["radius"] < 1 for fixed in several[0]["fixed"]) == 2
    assert math.dist(several[0]["picard"]["points"][-1], several[1]["picard"]["points"][-1]) > 1
    nowhere = run(page, scale=1, angle=0, bend=0)
    assert nowhere["fixed"] == []
    assert nowhere["anderson"]["residuals"] == pytest.approx([math.hypot(1, 0.5)] * 300)


@pytest.mark.browser
def test_step_play_and_pause(visit):
    page = visit("player")
    count = page.locator("[data-part=picard-count]")
    assert count.inner_text() == "26", "opens at the end of the run"
    page.click("[data-part=back]")
    assert count.inner_text() == "1"
    page.click("[data-part=step]")
    page.click("[data-part=step]")
    assert count.inner_text() == "3"
    assert page.locator(".eq-plane circle.eq-picard").count() == 3
    assert page.locator("[data-part=picard-outcome]").inner_text() == "…"
    play = page.locator("[data-part=play]")
    play.click()
    assert play.inner_text() == "Pause"
    page.wait_for_function("Number(document.querySelector('[data-part=picard-count]').textContent) >= 5")
    play.click()
    assert play.inner_text() == "Play"
    assert not page.evaluate("eqPlayer.state.playing")
    page.click("[data-part=end]")
    assert (count.inner_text(), page.locator("[data-part=end]").is_disabled()) == ("26", True)


@pytest.mark.browser
def test_reduced_motion_shows_the_result_at_once(visit):
    page = visit("player", reduced_motion="reduce")
    page.click("[data-part=back]")
    page.click("[data-part=play]")
    assert page.evaluate("[eqPlayer.state.shown, eqPlayer.state.playing]") == [26, False]


@pytest.mark.browser
def test_start_point_by_mouse_and_keyboard(visit):
    page = visit("player")
    plane = page.locator("[data-part=plane]")
    box = plane.locator("svg").bounding_box()
    plane.locator("svg").click(position={"x": box["width"] * 0.75, "y": box["height"] * 0.75})
    x, y = page.evaluate("[eqPlayer.state.x, eqPlayer.state.y]")
    assert (x, y) == pytest.approx((2, -2), abs=0.05)
    plane.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Shift+ArrowUp")
    moved = page.evaluate("[eqPlayer.state.x, eqPlayer.state.y]")
    assert moved == pytest.approx([x - 0.1, y + 1], abs=1e-9)
    assert float(page.locator("[data-number=x]").input_value()) == pytest.approx(moved[0])
    link = page.evaluate("location.hash")
    assert visit("player", link).evaluate("eqPlayer.state.x") == moved[0]
    page.click("[data-part=reset]")
    assert page.evaluate("[eqPlayer.state.x, location.hash]") == [-2.5, ""]


@pytest.mark.browser
def test_slider_bends_the_map(visit):
    page = visit("player")
    slider = page.get_by_role("slider", name="scale size of the linear part")
    slider.focus()
    page.keyboard.press("End")
    assert page.locator("[data-part=L]").inner_text() == "2"
    assert "none" in page.locator("[data-part=bound]").inner_text()
    page.keyboard.press("Home")
    assert page.locator("[data-part=L]").inner_text() == "0"
    assert page.locator("[data-part=picard-count]").inner_text() == "2"


# ---- inside the lessons


def lesson_text(name: str) -> str:
    cells = json.loads((BOOK.parent / "notebooks" / f"{name}.ipynb").read_text("utf8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def scenes(name: str) -> list[dict]:
    """The settings of the buttons of a lesson, in their order."""
    links = re.findall(r'data-try="([^"]*)"', lesson_text(name))
    return [{key: float(x) for key, x in (pair.split("=") for pair in link.split("&"))} for link in links]


@pytest.mark.parametrize(("lesson", "element"), LESSONS.items())
def test_a_lesson_holds_its_element_once(lesson, element):
    assert re.findall(r"^```\{interactive\} (\w+)\n```$", lesson_text(lesson), re.M) == [element]
    assert len(scenes(lesson)) >= 3


def test_the_directive_repeats_the_markup_of_the_page(tmp_path):
    """Rendered by Sphinx alone: the element is in the lesson, with scripts that a page one folder deep finds."""
    (tmp_path / "notebooks").mkdir()
    lesson = "# x\n\n```{interactive} player\n```\n"
    (tmp_path / "notebooks" / "lesson.md").write_text(lesson)
    (tmp_path / "index.md").write_text("# x\n\n```{toctree}\nnotebooks/lesson\n```\n")
    (tmp_path / "conf.py").write_text(
        f"import sys\nsys.path.insert(0, {str(BOOK / '_ext')!r})\nextensions = ['myst_parser', 'interactive']\n"
        f"html_static_path = [{str(BOOK / '_static')!r}]\nhtml_theme = 'basic'\n"
    )
    build = [sys.executable, "-m", "sphinx", "-q", "-b", "html", str(tmp_path), str(tmp_path / "out")]
    subprocess.run(build, check=True, capture_output=True)
    page = tmp_path / "out" / "notebooks" / "lesson.html"
    text = page.read_text("utf8")
    assert interactive.markup("player") in text and text.count('id="eq-player"') == 1
    for script in re.findall(r'(?:src|href)="(\.\./_static/(?:interactive|equilibrium|player)[^"]*)"', text):
        assert (page.parent / script).is_file(), script


def test_an_unknown_element_is_refused():
    with pytest.raises(ValueError, match="interactive piano: must be one of player, explorer"):
        interactive.markup("piano")


@pytest.mark.browser
def test_what_the_lessons_say_about_the_player_is_true(compute_page):
    page = compute_page("player")
    reached, bent, square, weighted = (run(page, **scene) for scene in scenes("01_banach"))
    assert reached["L"] == bent["L"] == pytest.approx(0.85) and reached["bound"] == bent["bound"] == 64
    assert (reached["picard"]["steps"], reached["picard"]["evaluations"]) == (64, 65)
    assert bent["picard"]["evaluations"] == 26
    assert square["L"] == 1 and square["picard"]["outcome"] == "not converged" and len(square["fixed"]) == 1
    assert (weighted["L"], weighted["fixed"][0]["radius"]) == pytest.approx((1.2, 0.8))
    assert (weighted["picard"]["evaluations"], weighted["picard"]["outcome"]) == (50, "converged")
    first, turn, several = scenes("05_solvers")
    both = run(page, **first)
    assert [both[name]["evaluations"] for name in ("picard", "anderson")] == [65, 65]
    assert run(page, **turn)["picard"]["outcome"] == "not converged"
    assert [run(page, **{**turn, "m": m})["anderson"]["evaluations"] for m in (3, 2)] == [4, 63]
    three = run(page, **several)
    assert len(three["fixed"]) == 3
    assert [three[name]["evaluations"] for name in ("picard", "anderson")] == [9, 22]


def test_what_the_lesson_says_about_the_explorer_is_true():
    """The explorer's numbers are those of Python, as the tests above show."""
    paper, little, many = (
        LipschitzSpec(**{key: int(x) if key == "n" else x for key, x in scene.items()})
        for scene in scenes("11_composition")
    )
    answers = lesson_text("11_composition").split("What you should have seen")[1]
    assert [round(paper.L(r), 4) for r in ("reported", "spectral", "perron")] == [1.0035, 0.9255, 0.8611]
    M = little.fusion_matrix()
    norms = [round(norm(M), 2) for norm in (bounds.frobenius, bounds.spectral, lambda A: bounds.perron(A)[0])]
    assert norms == [1.98, 1.02, 1.02] and f"{little.L('reported'):.4f}" == "1.0412"
    assert (f"{many.L('reported'):.3f}", f"{many.L('perron'):.4f}") == ("1.272", "0.9007")
    for number in (".9255", ".8611", "1.0035", "1.98", "1.0412", "1.272", ".9007"):
        assert f"${number}$" in answers
    steep, gain, relu = (LipschitzSpec(**scene) for scene in scenes("12_bound"))
    answers = lesson_text("12_bound").split("What you should have seen")[1]
    for spec, readings in (
        (steep, ("reported", "spectral", "perron")),
        (gain, ("reported",)),
        (relu, ("spectral", "perron")),
    ):
        for reading in readings:
            assert f"${spec.L(reading):.4f}$".replace("$0.", "$.") in answers
    assert f"${relu.L('reported'):.4f}$" in answers and gain.L("reported") == pytest.approx(
        paper.L("reported") * 2 / 3, rel=0.01
    )
