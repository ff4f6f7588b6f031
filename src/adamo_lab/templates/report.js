"use strict";
// A click on a figure shows it large; without this script the link leads to the picture's file.
const viewer = document.querySelector("dialog");
document.addEventListener("click", (event) => {
  const link = event.target.closest("a.zoom");
  if (link && !(event.ctrlKey || event.metaKey || event.shiftKey)) {
    event.preventDefault();
    const image = link.querySelector("img").cloneNode();
    viewer.querySelector("div").replaceChildren(image);
    viewer.querySelector("p").textContent = link.parentElement.querySelector("figcaption").textContent;
    viewer.showModal();
  } else if (event.target === viewer) {
    viewer.close();
  }
});
// On paper there is nothing to open.
addEventListener("beforeprint", () => {
  for (const closed of document.querySelectorAll("details:not([open])")) closed.open = true;
});
