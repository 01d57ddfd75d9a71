// Shows one slide at a time. Keys: arrows, space, Home, End, N notes, O overview, D dark or light, F full screen, ? help.
"use strict";
(() => {
  const root = document.documentElement;
  const deck = document.getElementById("deck");
  const slides = [...deck.querySelectorAll(".slide")];
  const make = (tag, name, text = "") => {
    const node = Object.assign(document.createElement(tag), { className: name, textContent: text });
    document.body.append(node);
    return node;
  };
  const bar = make("div", "bar");
  const panel = make("div", "panel");
  panel.hidden = true;
  const foot = make("footer", "foot");
  const name = Object.assign(document.createElement("span"), { textContent: deck.dataset.footer });
  const nav = document.createElement("span");
  const count = document.createElement("span");
  count.setAttribute("aria-live", "polite");
  const button = (text, label, act) => {
    const b = Object.assign(document.createElement("button"), { type: "button", textContent: text, onclick: act });
    b.setAttribute("aria-label", label);
    return b;
  };
  nav.append(button("‹", "previous slide", () => go(now - 1)), " ", count, " ", button("›", "next slide", () => go(now + 1)), " ",
    button("?", "keys", () => help()));
  foot.append(name, nav);

  let now = 0;
  let notes = false;

  function go(to) {
    now = Math.min(Math.max(to, 0), slides.length - 1);
    slides.forEach((slide, i) => {
      slide.classList.toggle("now", i === now);
      slide.toggleAttribute("aria-hidden", i !== now && !document.body.classList.contains("overview"));
    });
    bar.style.width = `${(100 * (now + 1)) / slides.length}%`;
    count.textContent = `${now + 1} / ${slides.length}`;
    const note = slides[now].querySelector(".notes");
    panel.hidden = !notes;
    panel.replaceChildren(...(note ? [...note.cloneNode(true).childNodes] : ["No notes."]));
    history.replaceState(null, "", `#${now + 1}`);
  }
  // Letters shrink, at most to 18 pixels, until what is on a slide has room; a formula that is too wide shrinks alone.
  // The tests read data-fit: the share of the full size, or "overflow".
  function fit(slide) {
    const body = slide.querySelector(".body");
    const shown = slide.classList.contains("now");
    slide.classList.add("now");
    const box = (node) => node.getBoundingClientRect();
    const parts = [...body.querySelectorAll("p, pre, table, figure, li, blockquote")];
    const formulas = [...body.querySelectorAll('mjx-container[display="true"]')];
    const full = 31;
    let size = full;
    const wide = (node) => box(node.querySelector("svg")).right > box(node.parentElement).right + 1;
    const narrow = () => formulas.forEach((node) => {
      for (let share = 100; share >= 62; share -= 2) {
        node.style.fontSize = `${share}%`;
        if (!wide(node)) return;
      }
    });
    const over = () => parts.some((node) => box(node).bottom > box(body).bottom + 1 || box(node).top < box(body).top - 1 ||
      box(node).right > box(body).right + 1) || formulas.some(wide);
    const set = () => { body.style.fontSize = `${size}px`; narrow(); };
    for (set(); over() && size > 18; set()) size -= 0.5;
    slide.dataset.fit = over() ? "overflow" : (size / full).toFixed(2);
    slide.classList.toggle("now", shown);
  }
  function scale() {
    deck.style.setProperty("--scale", Math.min(innerWidth / 1280, innerHeight / 720));
  }
  function theme(to) {
    root.dataset.theme = to;
  }
  function overview(on) {
    document.body.classList.toggle("overview", on);
    go(now);
    if (on) slides[now].scrollIntoView({ block: "center" });
  }
  function help() {
    let box = document.querySelector("dialog");
    if (!box) {
      box = make("dialog", "");
      box.textContent = "→ space: next · ←: back · Home, End · N: notes · O: overview · D: dark or light · F: full screen · Esc: close";
    }
    box.open ? box.close() : box.showModal();
  }
  const keys = {
    ArrowRight: () => go(now + 1), ArrowDown: () => go(now + 1), PageDown: () => go(now + 1), " ": () => go(now + 1),
    ArrowLeft: () => go(now - 1), ArrowUp: () => go(now - 1), PageUp: () => go(now - 1),
    Home: () => go(0), End: () => go(slides.length - 1),
    n: () => { notes = !notes; go(now); },
    o: () => overview(!document.body.classList.contains("overview")),
    d: () => theme(root.dataset.theme === "dark" ? "light" : "dark"),
    f: () => (document.fullscreenElement ? document.exitFullscreen() : root.requestFullscreen()),
    "?": help,
  };
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || (event.key === " " && event.target.tagName === "BUTTON")) return;
    const act = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (act) { event.preventDefault(); act(); }
  });
  slides.forEach((slide, i) => slide.addEventListener("click", () => {
    if (document.body.classList.contains("overview")) { now = i; overview(false); }
  }));
  let touch = 0;
  addEventListener("touchstart", (event) => { touch = event.changedTouches[0].clientX; }, { passive: true });
  addEventListener("touchend", (event) => {
    const moved = event.changedTouches[0].clientX - touch;
    if (Math.abs(moved) > 60) go(now + (moved < 0 ? 1 : -1));
  });
  addEventListener("resize", scale);
  addEventListener("hashchange", () => go(Number(location.hash.slice(1)) - 1 || 0));

  theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  scale();
  go(Number(location.hash.slice(1)) - 1 || 0);
  MathJax.startup.promise
    .then(() => MathJax.typesetPromise([deck]))
    .then(() => Promise.all([...document.images].map((image) => image.decode().catch(() => {}))))
    .then(() => { slides.forEach(fit); go(now); root.dataset.ready = "yes"; });
})();
