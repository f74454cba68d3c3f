"use strict";
(() => {
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);

  // Titles become our own tooltip, which a finger can open too; without scripts they stay titles.
  const tips = new Map();
  for (const title of document.querySelectorAll(".plot rect > title")) {
    tips.set(title.parentNode, title.textContent);
    title.remove();
  }
  const show = (event) => {
    const words = tips.get(event.target);
    tip.hidden = !words;
    if (!words) return;
    tip.textContent = words;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const below = event.clientY + 18;
    const fits = below + tip.offsetHeight < innerHeight;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${fits ? below : event.clientY - tip.offsetHeight - 12}px`;
  };
  document.addEventListener("pointermove", show);
  document.addEventListener("pointerdown", show);
  document.addEventListener("scroll", () => { tip.hidden = true; }, true);

  // A layer's button picks the layer out in all panels, until it is pressed again.
  const buttons = [...document.querySelectorAll(".layers button")];
  const chart = document.querySelector(".timeline");
  const pick = (layer) => {
    chart.classList.toggle("picking", layer !== null);
    for (const shape of chart.querySelectorAll(".picked")) shape.classList.remove("picked");
    if (layer === null) return;
    for (const shape of chart.querySelectorAll(`.c${layer}`)) shape.classList.add("picked");
  };
  for (const button of buttons) {
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      for (const other of buttons) other.setAttribute("aria-pressed", String(on && other === button));
      pick(on ? button.dataset.layer : null);
    });
  }
})();
