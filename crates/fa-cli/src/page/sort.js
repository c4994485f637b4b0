// A table is sorted by the column whose heading is pressed, the other way round by the same again.
for (const table of document.querySelectorAll('table.sorts')) {
  const body = table.tBodies[0], [head, ...rows] = body.rows;
  // On a narrow screen each value stands behind its heading.
  for (const row of rows) [...row.cells].forEach((cell, at) => { cell.dataset.label = head.cells[at].textContent; });
  // Numbers as they are written, or as <data> has them exactly; what has none comes last.
  const numbers = (cell) => {
    const exact = cell.querySelector('data');
    return ((exact ? exact.value : cell.textContent).match(/-?\d+(\.\d+)?(e[-+]?\d+)?/g) || [1e999]).map(Number);
  };
  const compare = (a, b) => {
    if (!a.matches('.n')) return a.textContent.localeCompare(b.textContent, 'en', { numeric: true });
    const [x, y] = [numbers(a), numbers(b)], at = x.findIndex((one, i) => one !== y[i]);
    return at < 0 ? x.length - y.length : x[at] - (y[at] ?? -1e999);
  };
  for (const [column, cell] of rows.length > 1 ? [...head.cells].entries() : []) {
    if (!cell.textContent) continue;
    const button = document.createElement('button');
    button.append(...cell.childNodes);
    cell.append(button);
    button.onclick = () => {
      const turn = cell.ariaSort === 'ascending' ? -1 : 1;
      for (const other of head.cells) other.removeAttribute('aria-sort');
      cell.setAttribute('aria-sort', turn > 0 ? 'ascending' : 'descending');
      rows.sort((a, b) => turn * compare(a.cells[column], b.cells[column]));
      body.append(...rows);
    };
  }
}
