/* What both interactive pages share: elements, sliders with a number beside them, settings in the address. */
(() => {
  "use strict";

  const SVG = ["svg", "g", "path", "line", "rect", "circle", "text", "title", "desc"];

  /** A new element: attributes, then children (strings become text). */
  function el(tag, attributes = {}, ...children) {
    const svg = SVG.includes(tag);
    const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  const short = (x) => String(Number(x.toPrecision(12)));
  const allowed = (f, x) => x >= f.min && x <= f.max && (f.step !== 1 || Number.isInteger(x));

  /** A slider (unless f.typed) and a number input for field f = {name, label, text, min, max, step, typed}.

      set(x) is called with a valid value, say(text) with a complaint about an invalid one. Returns show(x). */
  function addSlider(holder, f, set, say) {
    const id = `lip-${f.name}`;
    const number = el("input", { type: "number", min: f.min, max: f.max, step: f.step === 1 ? 1 : "any" });
    number.dataset.number = f.name;
    const label = el("label", { for: id }, el("b", {}, f.label ?? f.name), ` ${f.text}`);
    const box = el("div", { class: "lip-slider" }, label, number);
    let range = null;
    if (f.typed) number.id = id;
    else {
      range = el("input", { type: "range", id, min: f.min, max: f.max, step: f.step, "data-field": f.name });
      range.addEventListener("input", () => set(Number(range.value)));
      number.setAttribute("aria-label", `${f.name}, ${f.text}: type a value`);
      box.append(range);
    }
    let now = f.min;
    const valid = () => number.value.trim() !== "" && allowed(f, Number(number.value));
    number.addEventListener("input", () => {
      if (valid()) set(Number(number.value));
      number.setAttribute("aria-invalid", String(!valid()));
    });
    number.addEventListener("change", () => {
      if (!valid()) say(`${f.name} = ${number.value || "?"}: must be in [${f.min}, ${f.max}] here`);
      number.value = short(now);
      number.setAttribute("aria-invalid", "false");
    });
    holder.append(box);
    return (x) => {
      now = x;
      if (range) {
        range.value = x;
        range.setAttribute("aria-valuetext", short(x));
      }
      // do not rewrite "0.40" under the hands of somebody who types
      if (document.activeElement !== number || Number(number.value) !== x) number.value = short(x);
      number.setAttribute("aria-invalid", "false");
    };
  }

  /** The pairs after the # of the address, or null; valid numbers of the fields as numbers, the rest as text. */
  function readLink(fields) {
    if (!location.hash.includes("=")) return null;
    const found = {};
    for (const [key, text] of new URLSearchParams(location.hash.slice(1))) {
      const f = fields.find(({ name }) => name === key);
      if (!f) found[key] = text;
      else if (text !== "" && allowed(f, Number(text))) found[key] = Number(text);
    }
    return found;
  }

  function writeLink(state, keys) {
    const hash = "#" + keys.map((key) => `${key}=${state[key]}`).join("&");
    if (location.hash !== hash) history.replaceState(null, "", hash);
  }

  /** Buttons in the text, <button data-try="a=0.4&x=c">, put their setting into the address. */
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-try]");
    if (!button) return;
    location.hash = button.dataset.try;
    document.querySelector(".lip-app").scrollIntoView();
  });

  window.lipPage = { el, short, addSlider, readLink, writeLink };
})();
