// For all pages: boxes that scroll can be reached by the keyboard; a cross reference shows what it points to.
(() => {
  "use strict";
  const SCROLLS = ".bd-content :is(mjx-container[display], figure, table, pre, div.cell_output, div.math, .lip-scroll)";
  function markScrolling() {
    for (const box of document.querySelectorAll(SCROLLS)) {
      if (box.scrollWidth > box.clientWidth + 1) box.tabIndex = 0;
      else if (box.getAttribute("tabindex") === "0" && !box.hasAttribute("role")) box.removeAttribute("tabindex");
    }
  }

  const root = new URL("..", document.currentScript.src); // this file is in _static/
  const tip = Object.assign(document.createElement("div"), { id: "preview", className: "preview", hidden: true });
  tip.setAttribute("role", "tooltip");
  let waiting = 0;
  let owner = null;

  function hide() {
    clearTimeout(waiting);
    owner?.removeAttribute("aria-describedby");
    owner = null;
    tip.hidden = true;
  }

  function load() {
    return (load.once ??= new Promise((done, failed) => {
      const script = document.createElement("script");
      script.src = new URL("_static/previews.js", root).href;
      script.onload = done;
      script.onerror = failed;
      document.head.append(script);
    }));
  }

  async function show(link) {
    await load();
    const url = new URL(link.href);
    const html = window.bookPreviews[decodeURIComponent(url.href.slice(root.href.length)).replace(/\?[^#]*/, "")];
    if (!html || owner !== link) return;
    tip.innerHTML = html;
    tip.hidden = false;
    await window.MathJax?.typesetPromise?.([tip]);
    if (owner !== link) return;
    const at = link.getBoundingClientRect();
    const above = at.bottom + tip.offsetHeight + 12 > innerHeight && at.top > tip.offsetHeight + 12;
    tip.style.top = `${scrollY + (above ? at.top - tip.offsetHeight - 6 : at.bottom + 6)}px`;
    tip.style.left = `${Math.max(8, Math.min(at.left, document.documentElement.clientWidth - tip.offsetWidth - 8))}px`;
    link.setAttribute("aria-describedby", tip.id);
  }

  function wants(event) {
    const link = event.target.closest?.(".bd-content article a.reference.internal[href*='#'], .bd-content article a[href*='#equation']");
    if (!link || link === owner) return;
    hide();
    owner = link;
    waiting = setTimeout(() => show(link).catch(hide), event.type === "focusin" ? 0 : 250);
  }

  addEventListener("DOMContentLoaded", () => {
    document.body.append(tip);
    document.addEventListener("mouseover", wants);
    document.addEventListener("focusin", wants);
    document.addEventListener("focusout", hide);
    document.addEventListener("mouseout", (event) => {
      // The pointer may move from the link onto the preview.
      if (owner && !tip.contains(event.relatedTarget) && !owner.contains(event.relatedTarget)) hide();
    });
    document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
  });
  addEventListener("load", () => {
    const ready = window.MathJax?.startup?.promise ?? Promise.resolve();
    ready.then(markScrolling);
    addEventListener("resize", markScrolling);
  });
})();
