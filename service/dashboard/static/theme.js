// Applies the theme that this browser has chosen before anything is drawn; without a choice, the system's is used.
"use strict";

(() => {
  const chosen = localStorage.getItem("theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
