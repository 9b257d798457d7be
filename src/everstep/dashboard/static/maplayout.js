// Where each node and worker of the cluster map is drawn, for a width and the size of text: a pure function.

const SIDES = [1.9, 1.6, 1.3, 1.1, 0.9, 0.75, 0.6, 0.5, 0.4, 0.32, 0.25, 0.2]; // of a cell, in rem; the first that fits
const WIDE = { width: 5.2, height: 2.7 }; // a cell with text, where there are few workers
const MOST_ROWS_REM = 30;
const LABELS = 400; // more nodes than that have no names in the map

/** -> {blocks: [{node, x, y, width, height, named}], cells: [{worker, x, y, width, height}], height, wide}: pixels. */
export function layout(nodes, width, rem, columns = 8) {
  const most = MOST_ROWS_REM * rem;
  const workers = nodes.reduce((sum, node) => sum + slots(node), 0);
  if (workers <= 96) {
    const shape = {
      cell: WIDE.width * rem,
      high: WIDE.height * rem,
      wide: true,
      columns: fitting(width, rem, columns),
    };
    const made = place(nodes, width, rem, shape);
    if (made.height <= most) return made;
  }
  return squares(nodes, width, rem, columns, true) ?? squares(nodes, width, rem, columns, false);
}

/** The largest cells that fit: with the nodes' names where these have room, else without. */
function squares(nodes, width, rem, columns, named) {
  let made = null;
  for (const side of SIDES) {
    made = place(nodes, width, rem, { cell: side * rem, high: side * rem, wide: false, columns, named });
    if (made.height <= MOST_ROWS_REM * rem) return named && !made.named ? null : made;
  }
  return named ? null : made;
}

/** Text cells in a row: as many as go on a narrow screen, but even ones. */
function fitting(width, rem, columns) {
  const fit = Math.floor((width - rem) / (WIDE.width * rem));
  return fit >= columns ? columns : fit >= 4 ? 4 : Math.max(1, Math.min(2, fit));
}

const slots = (node) => Math.max(node.workers.length, node.workers.length ? 1 : Math.min(node.slots || 1, 8), 1);

function place(nodes, width, rem, { cell, high, wide, columns, named: wanted = true }) {
  const gap = wide ? 0.25 * rem : Math.max(1, Math.round(cell * 0.12));
  const pad = wide ? 0.4 * rem : Math.max(2, gap * 2);
  const across = Math.min(columns, Math.max(...nodes.map(slots), 1));
  const blockWidth = Math.min(width, across * (cell + gap) - gap + 2 * pad);
  const named = wanted && nodes.length <= LABELS && blockWidth >= 3.2 * rem;
  const top = named ? 1.25 * rem : pad;
  const between = wide ? 0.6 * rem : Math.max(2, pad);
  const blocks = [],
    cells = [];
  let x = 0,
    y = 0,
    rowHeight = 0;
  for (const node of nodes) {
    const rows = Math.ceil(slots(node) / across);
    const height = top + rows * (high + gap) - gap + pad;
    if (x > 0 && x + blockWidth > width + 0.5) {
      y += rowHeight + between;
      x = rowHeight = 0;
    }
    blocks.push({ node, x, y, width: blockWidth, height, named, pad });
    node.workers.forEach((worker, i) =>
      cells.push({
        worker,
        x: x + pad + (i % across) * (cell + gap),
        y: y + top + Math.floor(i / across) * (high + gap),
        width: cell,
        height: high,
      }),
    );
    rowHeight = Math.max(rowHeight, height);
    x += blockWidth + between;
  }
  return { blocks, cells, height: y + rowHeight, wide, across, named };
}

/** Cells of a waffle: {state, x, y, side}, filled by columns from the left. */
export function waffleLayout(parts, width, rem) {
  const num = parts.reduce((sum, part) => sum + part.cells, 0);
  const area = (width * 16 * rem) / Math.max(num, 1);
  const side = Math.max(0.25 * rem, Math.min(1.1 * rem, Math.floor(Math.sqrt(area))));
  const across = Math.max(1, Math.floor(width / side));
  const cells = [];
  for (const part of parts) {
    for (let i = 0; i < part.cells; i++) {
      const at = cells.length;
      cells.push({
        state: part.state,
        x: (at % across) * side,
        y: Math.floor(at / across) * side,
        side: side - Math.max(1, side * 0.14),
      });
    }
  }
  return { cells, height: Math.ceil(num / across) * side };
}
