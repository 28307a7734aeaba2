// Runs before the first paint, so that a chosen theme does not flash. The rest of the page is modules.
'use strict';
try {
  const { theme } = JSON.parse(localStorage.getItem('kt.settings')) || {};
  if (theme === 'light' || theme === 'dark') document.documentElement.dataset.theme = theme;
} catch { /* storage that is off or spoilt: follow the system */ }
