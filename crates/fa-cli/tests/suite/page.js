// Looks at every page at some widths in light, in the dark and as print, and says what is wrong with it. A page is an
// iframe; `pages` has their names.
const STATES = [
  ...[390, 768, 1600].flatMap((width) => ['light', 'dark'].map((mode) => ({ width, mode }))),
  // Letter with wide margins, A4, A4 across.
  ...[640, 703, 1040].map((width) => ({ width, mode: 'print' })),
];
let found = [];

function inspect(frame) {
  const view = frame.contentWindow, doc = view.document, style = doc.querySelector('style'), written = style.textContent;
  const numbers = [...doc.querySelectorAll('data')].map((one) => Number(one.value));
  found = [];
  const loads = view.performance.getEntriesByType('resource');
  if (loads.length) found.push(`loads ${loads[0].name}`);
  for (const tip of doc.querySelectorAll('[data-tip], .pt')) if (tip.tabIndex < 0) found.push('a tip without focus');
  for (const { width, mode } of STATES) {
    frame.style.width = `${width}px`;
    frame.style.colorScheme = mode === 'dark' ? 'dark' : 'light';
    // What is for paper holds here, what is for screens does not: nothing is spoken.
    if (mode === 'print') {
      style.textContent = written.replaceAll('@media print', '@media all').replaceAll('@media screen', '@media speech');
    }
    const say = (what) => found.push(`${width} ${mode}: ${what}`);
    look(view, width, mode, say);
    if (width === 768 && mode === 'dark') {
      accounts(doc, say);
      doc.querySelectorAll('table.sorts').forEach((table) => sort(table, say));
    }
  }
  frame.remove();
  return { found, numbers };
}

function look(view, width, mode, say) {
  const doc = view.document, root = doc.documentElement;
  if (root.scrollWidth > width) say(`the page is ${root.scrollWidth} wide`);
  const paper = rgb(view.getComputedStyle(doc.body).backgroundColor);
  if (paper[0] > 128 === (mode === 'dark')) say(`has the other mode: ${paper}`);
  const name = (element) =>
    `${element.tagName} ${element.getAttribute('class') || ''} '${element.textContent.slice(0, 40)}'`;
  // Colours are the same at every width.
  const colors = width === 768 || width === 703;
  // The dark has its colours, and the same places.
  if (mode === 'dark' && !colors) return;
  for (const element of doc.querySelectorAll('main *')) {
    const own = element.getBoundingClientRect();
    if (!own.width) continue;
    // Lanes may scroll on a screen.
    if ((own.right > width + 1 || own.left < -1) && (mode === 'print' || !element.closest('.scroll, .bar, .cell')))
      say(`from ${own.left} to ${own.right}: ${name(element)}`);
    if (colors && [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim())) {
      const ratio = contrast(view, element, view.getComputedStyle(element));
      if (ratio < 4.5) say(`contrast ${ratio}: ${name(element)}`);
    }
  }
  const wide = (element) => element.scrollWidth > element.clientWidth + 1;
  for (const one of doc.querySelectorAll('.scroll:has(table)')) if (wide(one)) say(`a table scrolls: ${name(one)}`);
  for (const one of doc.querySelectorAll('.cell, .card, section')) if (wide(one)) say(`too narrow: ${name(one)}`);
  for (const one of doc.querySelectorAll('.sp b, .bar b'))
    if (one.offsetWidth && one.scrollWidth > one.parentElement.clientWidth + 1) say(`cut in its bar: ${name(one)}`);
  for (const drawing of doc.querySelectorAll('svg')) {
    const edge = drawing.getBoundingClientRect();
    const texts = [...drawing.querySelectorAll('text:not(.tip)')].map((one) => [one, one.getBoundingClientRect()]);
    texts.forEach(([one, own], index) => {
      if (own.left < edge.left - 1 || own.right > edge.right + 1 || own.top < edge.top - 1)
        say(`leaves its drawing: ${one.textContent}`);
      for (const [other, its] of texts.slice(index + 1)) {
        const across = Math.min(own.right, its.right) - Math.max(own.left, its.left);
        const down = Math.min(own.bottom, its.bottom) - Math.max(own.top, its.top);
        // Boxes of texts are taller than their letters.
        if (across > 1 && down > 4) say(`'${one.textContent}' lies over '${other.textContent}'`);
      }
    });
  }
}

const rgb = (color) => (color.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);

// Of a text against the nearest background that is not transparent.
function contrast(view, element, style) {
  const luminance = (color) => {
    const [r, g, b] = color.map((one) => (one / 255 <= 0.03928 ? one / 255 / 12.92 : ((one / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ink = luminance(rgb(element.closest('svg') ? style.fill : style.color));
  let behind = element, background = rgb(style.backgroundColor);
  while (background[3] === 0 && behind.parentElement) {
    behind = behind.parentElement;
    background = rgb(view.getComputedStyle(behind).backgroundColor);
  }
  const paper = luminance(background);
  return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
}

// An account is shown by its cell, and only then.
function accounts(doc, say) {
  for (const input of [...doc.querySelectorAll('.cell input')].filter((_, index) => index % 9 === 0)) {
    const account = doc.getElementById('a' + input.id);
    input.checked = true;
    const shown = [...account.parentElement.children].filter((one) => one.offsetHeight > 0);
    if (shown.length !== 1 || shown[0] !== account) say(`${input.id} shows ${shown.length} accounts`);
  }
}

// Each heading is a button that sorts by its column, both ways, and loses no row.
function sort(table, say) {
  const order = () => [...table.tBodies[0].rows].slice(1), before = order();
  if (before.length < 2) return;
  if (table.closest('details')) table.closest('details').open = true;
  for (const [column, cell] of [...table.rows[0].cells].entries()) {
    const button = cell.querySelector('button');
    if (!button) { if (cell.textContent) say(`no button: ${cell.textContent}`); continue; }
    for (const way of ['ascending', 'descending']) {
      button.focus();
      if (cell.ownerDocument.activeElement !== button) say(`no focus: ${cell.textContent}`);
      button.click();
      const sorted = order();
      if (cell.getAttribute('aria-sort') !== way) say(`${cell.textContent} is not ${way}`);
      if (new Set(sorted).size !== before.length) say(`rows are lost by ${cell.textContent}`);
      const exact = sorted.map((row) => row.cells[column].querySelector('data')?.value).map(Number);
      if (!exact.every((one, i) => !i || !(way === 'ascending' ? exact[i - 1] > one : exact[i - 1] < one)))
        say(`${cell.textContent} ${way}: ${exact}`);
    }
    if (table.querySelectorAll('[aria-sort]').length !== 1) say('sorted by several columns');
  }
}

const errors = [];
window.onerror = (message) => { errors.push(`error: ${message}`); };
window.onload = () => {
  const results = [...document.querySelectorAll('iframe')].map(inspect);
  document.body.textContent = 'RESULT' + JSON.stringify({ errors, results }) + 'END';
};
