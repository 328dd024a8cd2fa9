// Before the first paint: scripts are there, and this is the colour scheme the reader chose last.
document.documentElement.classList.remove("no-js");
try {
  const chosen = localStorage.getItem("trapline-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch { /* storage may be forbidden; the system's scheme holds */ }
