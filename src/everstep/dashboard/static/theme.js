// Runs before the page is drawn, so that a reader who chose a theme never sees the other one flash.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("everstep-theme");
  } catch (error) {
    console.info("no storage here, so the theme is the system's", error.name);
  }
  const dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
})();
