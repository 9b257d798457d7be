// Draws the cluster map on its canvas. Every state has a shape of its own, not only a colour.

import { token } from "./dom.js";
import { stepTime } from "./format.js";
import { STATE } from "./workers.js";

/** Colours of the theme, looked up once for a drawing. */
export function palette() {
  const names = [
    "text",
    "muted",
    "line",
    "panel",
    "block",
    "idle",
    "bad-mark",
    "warn-mark",
    "accent",
    "on-cell",
    "on-bright",
    "gone",
  ];
  const colors = Object.fromEntries(names.map((name) => [name, token(name)]));
  colors.steps = [0, 1, 2, 3, 4].map((i) => token(`step-${i}`));
  colors.font = getComputedStyle(document.body).fontFamily;
  return colors;
}

export function begin(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const ctx = canvas.getContext("2d");
  ctx.setTransform(scale, 0, 0, scale, 0, 0);
  ctx.clearRect(0, 0, width, height);
  return ctx;
}

export function drawMap(canvas, made, width, rem, selected) {
  const colors = palette();
  const ctx = begin(canvas, width, made.height);
  for (const block of made.blocks) drawBlock(ctx, block, colors, rem);
  for (const cell of made.cells) drawCell(ctx, cell, colors, rem, made.wide);
  const chosen = made.cells.find((cell) => cell.worker.rank === selected);
  if (chosen) ring(ctx, chosen, colors.text, 2);
}

function drawBlock(ctx, { node, x, y, width, height, named, pad }, colors, rem) {
  ctx.fillStyle = colors.block;
  const lost = node.state === "lost";
  if (!lost) ctx.fillRect(x, y, width, height);
  if (node.state !== "up") {
    ctx.strokeStyle = lost ? colors["bad-mark"] : node.state === "leaving" ? colors["warn-mark"] : colors.idle;
    ctx.setLineDash([3, 3]);
    ctx.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
    ctx.setLineDash([]);
  }
  if (!named) return;
  const state = node.state === "up" ? "" : ` · ${node.state}`;
  ctx.font = `${0.75 * rem}px ${colors.font}`;
  ctx.fillStyle = colors.muted;
  ctx.textBaseline = "middle";
  ctx.fillText(fitted(ctx, node.short, state, width - 2 * pad), x + pad, y + 0.68 * rem);
}

/** Names of nodes differ at their ends, so what is too long loses its beginning; the frame tells the state, too. */
function fitted(ctx, name, state, width) {
  const texts = [name + state, name, ...[...name].map((_, cut) => `…${name.slice(cut + 1)}`)];
  return texts.find((text) => ctx.measureText(text).width <= width) ?? "";
}

function drawCell(ctx, cell, colors, rem, wide) {
  const { worker, x, y, width, height } = cell;
  const fill = fillOf(worker, colors);
  if (fill) {
    ctx.fillStyle = fill;
    ctx.fillRect(x, y, width, height);
  } else ring(ctx, cell, colors.idle, 1);
  if (wide) return writeCell(ctx, cell, colors, rem);
  if (worker.state === STATE.WARMS && width >= 5) half(ctx, cell, colors);
  if (worker.state === STATE.STOPPED) bars(ctx, cell, colors);
  if (worker.state === STATE.GONE) cross(ctx, cell, colors);
  if (worker.state === STATE.SLOW) ring(ctx, cell, colors["warn-mark"], Math.max(1.5, width / 8));
}

function fillOf(worker, colors) {
  if (worker.state === STATE.WAITS) return "";
  if (worker.state === STATE.STOPPED) return colors["bad-mark"];
  if (worker.state === STATE.GONE) return colors.gone;
  return worker.shade < 0 ? colors.idle : colors.steps[worker.shade];
}

function ring(ctx, { x, y, width, height }, color, thick) {
  ctx.strokeStyle = color;
  ctx.lineWidth = thick;
  ctx.strokeRect(x + thick / 2, y + thick / 2, width - thick, height - thick);
  ctx.lineWidth = 1;
}

function half(ctx, { x, y, width, height }, colors) {
  ctx.fillStyle = colors.block;
  ctx.beginPath();
  ctx.moveTo(x + width, y);
  ctx.lineTo(x + width, y + height);
  ctx.lineTo(x, y + height);
  ctx.fill();
  ring(ctx, { x, y, width, height }, colors.idle, 1);
}

function bars(ctx, { x, y, width, height }, colors) {
  ctx.fillStyle = colors.panel;
  ctx.fillRect(x + width * 0.28, y + height * 0.22, width * 0.15, height * 0.56);
  ctx.fillRect(x + width * 0.57, y + height * 0.22, width * 0.15, height * 0.56);
}

function cross(ctx, { x, y, width, height }, colors) {
  ctx.strokeStyle = colors["bad-mark"];
  ctx.lineWidth = Math.max(1, width / 7);
  ctx.beginPath();
  ctx.moveTo(x + width * 0.2, y + height * 0.2);
  ctx.lineTo(x + width * 0.8, y + height * 0.8);
  ctx.moveTo(x + width * 0.8, y + height * 0.2);
  ctx.lineTo(x + width * 0.2, y + height * 0.8);
  ctx.stroke();
  ctx.lineWidth = 1;
}

/** Colour of the text of a cell: dark on the bright colours of slow ones. */
function inkOn(worker) {
  if (worker.state === STATE.WAITS || worker.state === STATE.GONE) return "text";
  return worker.state === STATE.STOPPED || worker.shade > 0 ? "on-bright" : "on-cell";
}

/** A cell with words: the rank, and its step time or its state. */
function writeCell(ctx, { worker, x, y, width, height }, colors, rem) {
  const words = {
    [STATE.WARMS]: "warming up",
    [STATE.WAITS]: "standby",
    [STATE.STOPPED]: "stopped",
    [STATE.GONE]: "gone",
  };
  ctx.fillStyle = colors[inkOn(worker)];
  ctx.textBaseline = "middle";
  ctx.font = `600 ${0.8 * rem}px ${colors.font}`;
  ctx.fillText(worker.state === STATE.WAITS ? "spare" : `rank ${worker.rank}`, x + 0.4 * rem, y + height * 0.32);
  ctx.font = `${0.75 * rem}px ${colors.font}`;
  const own = worker.ownS >= 0 ? stepTime(worker.ownS).replace("\u00a0", " ") : "acts";
  const text = words[worker.state] ?? (worker.state === STATE.SLOW ? `${own}, slow` : own);
  ctx.fillText(text, x + 0.4 * rem, y + height * 0.72, width - 0.6 * rem);
}

export function drawWaffle(canvas, made, width) {
  const colors = palette();
  const ctx = begin(canvas, width, made.height);
  const fills = { acting: colors.steps[0], slow: colors["warn-mark"], spare: "", missing: "" };
  for (const cell of made.cells) {
    const box = { x: cell.x, y: cell.y, width: cell.side, height: cell.side };
    ctx.fillStyle = fills[cell.state];
    if (fills[cell.state]) ctx.fillRect(cell.x, cell.y, cell.side, cell.side);
    else ring(ctx, box, cell.state === "spare" ? colors.accent : colors["bad-mark"], 1);
    if (cell.state === "missing") cross(ctx, box, colors);
  }
}
