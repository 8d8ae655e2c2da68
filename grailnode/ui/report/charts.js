// Draws the curves of a page: each element with `data-plot` gets a plot of uPlot in place of its words.
"use strict";
const plots = new Map(); // by the id of their elements
const HEIGHT = 260;
const UNITS = ["B", "KB", "MB", "GB", "TB", "PB"];
const FONT = '12px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const LINES = { first: {}, second: {}, level: { dash: [6, 4], width: 1 } };

const colour = (name) => () => getComputedStyle(document.documentElement).getPropertyValue(name);
const whole = (value) => (Number.isInteger(value) ? value.toLocaleString("en") : "");
const fit = (item) => plots.get(item.id)?.setSize({ width: item.clientWidth, height: HEIGHT });
const sizes = new ResizeObserver((entries) => entries.forEach((entry) => fit(entry.target)));

function bytes(value) {
  const power = value < 1 ? 0 : Math.floor(Math.log10(value) / 3);
  return `${Number((value / 1000 ** power).toPrecision(3))} ${UNITS[power]}`;
}

function shareRange(_, low, high) {
  if (low === null) return [0, 1];
  const ends = { min: { pad: 0.1, hard: low < 0 ? -Infinity : 0 }, max: { pad: 0.1, hard: high > 1 ? Infinity : 1 } };
  const room = Math.max(0, 0.05 - (high - low)) / 2; // else a plot magnifies what hardly changes
  return uPlot.rangeNum(low - room, high + room, ends);
}

function decades(_, __, low, high) {
  return Array.from({ length: Math.round(Math.log10(high / low)) + 1 }, (_, power) => low * 10 ** power);
}

const UNIT_OPTIONS = {
  bytes: {
    words: bytes,
    scale: { distr: 3, range: (_, low, high) => (low === null ? [1, 10] : uPlot.rangeLog(low, high, 10, true)) },
    axis: { splits: decades, values: (_, marks) => marks.map((mark) => (mark === null ? "" : bytes(mark))) },
  },
  share: {
    words: (value) => String(Number(value.toPrecision(4))),
    scale: { range: shareRange },
    axis: {
      values: (_, marks, __, ___, step) => marks.map((mark) => mark.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9)))),
    },
  },
};

// Some figures are measured every few windows: uPlot joins points over `undefined`, and leaves a gap at `null`. Means of
// windows shift a point by one place.
function joined(values) {
  const places = [...values.keys()].filter((place) => values[place] !== null);
  const steps = places.slice(1).map((place, index) => place - places[index]);
  const usual = [...steps].sort((a, b) => a - b)[steps.length >> 1];
  const points = [...values];
  steps.forEach((step, index) => {
    if (step <= usual + 1) points.fill(undefined, places[index] + 1, places[index + 1]);
  });
  return points;
}

// uPlot draws points only where they stand far apart. A point between two gaps, which no line reaches, is always drawn.
function lonePoints(plot, series, areShown) {
  const values = plot.data[series];
  const isGap = (place) => !(place in values) || values[place] === null;
  const isLone = (place) => values[place] != null && isGap(place - 1) && isGap(place + 1);
  return areShown ? null : [...values.keys()].filter(isLone);
}

function options({ unit, names, colours }, width) {
  const { words, scale, axis } = UNIT_OPTIONS[unit];
  const style = { font: FONT, stroke: colour("--soft"), grid: { stroke: colour("--rule"), width: 1 }, ticks: { show: false } };
  const count = { label: names[0], labelFont: FONT, labelSize: 18, size: 26, grid: { show: false } };
  return {
    width,
    height: HEIGHT,
    scales: { x: { time: false }, y: scale },
    axes: [
      { ...style, ...count, values: (_, marks) => marks.map(whole) },
      { ...style, ...axis, size: 62 },
    ],
    series: [
      { label: names[0], value: (_, value) => (value === null ? "" : whole(value)) },
      ...colours.map((name, place) => ({
        label: names[place + 1],
        stroke: colour(name === "level" ? "--ink" : `--${name}`),
        width: 2,
        points: { size: 6, fill: colour("--card"), filter: lonePoints, ...(name === "level" && { show: false }) },
        value: (_, value) => (value == null ? "" : words(value)),
        ...LINES[name],
      })),
    ],
    cursor: { y: false, points: { size: 7 } },
  };
}

function drawPlots() {
  sizes.disconnect(); // from the elements that were replaced
  for (const item of document.querySelectorAll("[data-plot]")) {
    const spec = JSON.parse(item.dataset.plot);
    const data = [spec.columns[0], ...spec.columns.slice(1).map(joined)];
    const plot = plots.get(item.id);
    if (plot) {
      const [{ min, max }, old] = [plot.scales.x, plot.data[0]];
      item.replaceChildren(plot.root);
      const isWhole = min <= old[0] && max >= old[old.length - 1];
      plot.setData(data, isWhole); // a reader who has zoomed in sees the same windows
      if (!isWhole) plot.redraw();
    } else {
      item.replaceChildren();
      plots.set(item.id, new uPlot(options(spec, item.clientWidth), data, item));
    }
    sizes.observe(item);
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((plot) => plot.redraw()));
drawPlots();
