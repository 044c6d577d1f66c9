"use strict";
const $ = id => document.getElementById(id);
const make = (tag, set = {}, ...inside) => { const node = Object.assign(document.createElement(tag), set); node.append(...inside); return node; };
const at = (slide, ...rest) => ["slides", encodeURIComponent(slide), ...rest].join("/");
const say = text => { $("message").textContent = text; };
const swatch = color => make("i", { className: "swatch", style: `background:${color}` });
const OPACITY = { signed: 0.85, amount: 0.6, measure: 0.5 };  // of values, at first: as in the pictures
const GRID = "#2060c8", ASKED = "#d95f02", FOUND = "#111111", MOST_EDGES = 40000, LEAST_BORDER_PX = 7;
const MOST_CELLS = 10000, FRAME_CELLS = 1000, REST_MS = 120, SQUARE_PX = 2048, MOST_SQUARES = 200, CLASSLESS = "#5a5a5a";  // of cells
let ids = [], slide = null, hidden = false, found = [], asking = null, opening = 0, version = 0;
let asked = null;  // id of the slide that is shown, or being opened

async function get(url, options) {
  const answer = await fetch(url, options);
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error || `${answer.status} ${answer.statusText}`);
  return answer;
}

// ---- the picture ----
const { Point } = OpenSeadragon, viewer = OpenSeadragon({ element: $("osd"), drawer: "canvas", showNavigationControl: false,
  showNavigator: true, navigatorPosition: "TOP_RIGHT", navigatorSizeRatio: 0.16, navigatorBackground: "#fff", navigatorBorderColor: "#c7cedb",
  animationTime: 0.4, maxZoomPixelRatio: 4, minZoomImageRatio: 0.7, visibilityRatio: 0.3, gestureSettingsMouse: { clickToZoom: false } });
viewer.addHandler("canvas-key", event => { event.preventDefaultAction = true; });
const over = viewer.canvas.appendChild(make("canvas", { id: "over" }));

const source = ({ id, size, levels }) => ({ width: size[0], height: size[1], tileSize: 512, maxLevel: levels.length - 1,
  getLevelScale: n => 1 / levels[n].downsample, getTileWidth: n => levels[n].tile[0], getTileHeight: n => levels[n].tile[1],
  getNumTiles: n => new Point(...[0, 1].map(i => Math.ceil(levels[n].size[i] / levels[n].tile[i]))),
  getTileUrl: (n, x, y) => at(id, "tiles", n, x, y) });

async function open(id, then = () => {}, keys = null) {  // keys: of the layers to show
  if (slide && slide.id === id) { if (keys) { slide.layers.forEach(layer => turn(layer, among(keys, layer))); missing(keys); } return then(); }
  const now = ++opening, before = slide && slide.layers.filter(layer => layer.on);
  asked = id;
  say(""); $("name").textContent = id; document.title = `${id} - thinsection`;
  history.replaceState(null, "", `#${new URLSearchParams({ slide: id })}`);
  for (const row of $("list").children) row.classList.toggle("on", row.dataset.id === id);
  try {
    const facts = await (await get(at(id))).json();
    if (now !== opening) return;
    slide = facts; found = []; listMarks();
  } catch (error) {
    if (now === opening) { viewer.close(); slide = null; panel(); draw(); say(error.message); }
    return;
  }
  viewer.addOnceHandler("open", then);
  viewer.open(source(slide));
  panel(before, keys);
  if (keys) missing(keys);
  const mpp = slide.mpp ? [...new Set(slide.mpp.map(value => +value.toPrecision(4)))].join(" × ") + " µm/px" : "unknown resolution";
  $("facts").textContent = `${slide.size.join(" × ")} px, ${mpp}${slide.power ? `, ${slide.power}x` : ""}`;
}
function frame() {  // level-0 px -> px of the overlay: x + k * x_l0
  const [zero, end] = [new Point(0, 0), new Point(...slide.size)].map(point => viewer.viewport.imageToViewerElementCoordinates(point));
  return { x: zero.x, y: zero.y, k: (end.x - zero.x) / slide.size[0], width: viewer.canvas.clientWidth, height: viewer.canvas.clientHeight };
}
const jump = ({ x, y, width: w, height: h }) => viewer.viewport.fitBounds(viewer.viewport.imageToViewportRectangle(x - 2.5 * w, y - 2.5 * h, 6 * w, 6 * h));

// ---- the address: slide, level-0 px in the middle, level-0 px per px of the screen, layers ----
function missing(keys) {  // names of an address that no layer has
  const names = keys.filter(key => key && !key.endsWith("/") && !slide.layers.some(layer => layer.key === key));
  if (names.length) say(`The link shows the layer ${names.join(", ")}, which this slide does not have; the name of a layer of tiles is GRID/COLUMN.`);
}
const among = (keys, layer) => keys.some(key => key === layer.key || (key.endsWith("/") && layer.kind === "outlines" && !layer.empty && layer.key.startsWith(key)));
function middle() {
  const { x, y, k, width, height } = frame();
  return { x: Math.round((width / 2 - x) / k), y: Math.round((height / 2 - y) / k), downsample: +(1 / k).toPrecision(4) };
}
function address() {
  const place = new URLSearchParams({ slide: slide.id, ...middle() }), on = slide.layers.filter(layer => layer.on);
  (on.length ? on.map(layer => layer.key) : [""]).forEach(key => place.append("layer", key));
  return `#${place}`;
}
let noting = 0;
function note() {  // browsers allow few changes of the address in a second
  clearTimeout(noting);
  noting = setTimeout(() => {
    // while another slide is being opened, the address is that of the other one
    const isShown = slide && slide.id === asked && viewer.world.getItemAt(0);
    if (isShown) history.replaceState(null, "", address());
  }, 250);
}
function follow(hash) {
  const place = new URLSearchParams(hash.slice(1)), id = place.get("slide"), [x, y, downsample] = ["x", "y", "downsample"].map(name => parseFloat(place.get(name)));
  if (id && !ids.includes(id)) say(`The link is for the slide ${id}, which this viewer does not show.`);
  if (!ids.includes(id)) return false;
  open(id, () => {
    const { viewport } = viewer;
    if (downsample > 0) viewport.zoomTo(viewport.imageToViewportZoom(1 / downsample), null, true);
    if (Number.isFinite(x + y)) viewport.panTo(viewport.imageToViewportCoordinates(x, y), true);
  }, place.has("layer") ? place.getAll("layer") : null);
  return true;
}
// the address may have been noted again since it changed
window.addEventListener("hashchange", event => follow(new URL(event.newURL).hash));
async function copy(text, words) {
  try { await navigator.clipboard.writeText(text); $("said").textContent = `Copied ${words}`; } catch { $("said").textContent = text; }
}
const copyLink = () => { if (slide) { history.replaceState(null, "", address()); copy(location.href, "the link"); } };
function copyPlace() {  // of the last mark, or of the middle
  if (!slide) return;
  const last = marksOf().at(-1), { x, y } = middle(), text = (last ? numbers(last) : [x, y]).join(", ");
  copy(text, `${text} (level-0 px${last ? last.kind === "box" ? ": x, y, width, height" : "" : ", the middle"})`);
}

// ---- layers ----
const rgb = hex => [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16));
function colorAt(colors, share) {  // between the steps of a colour map
  const place = Math.min(Math.max(share, 0), 1) * (colors.length - 1), i = Math.min(Math.floor(place), colors.length - 2);
  const [a, b] = [rgb(colors[i]), rgb(colors[i + 1])];
  return a.map((value, c) => value + (b[c] - value) * (place - i));
}
// from 0 to 1: it grows with |value|, but for measures; where a model says nothing, nothing is painted
const strength = (scale, share) => scale === "signed" ? Math.abs(2 * share - 1) : scale === "amount" ? share : 1;
async function load(layer) {
  const answer = await get(at(slide.id, "layers", layer.number));
  if (layer.kind === "outlines") return shapes(await answer.json());
  const bytes = await answer.arrayBuffer(), [count, width, height, dx, dy] = new Uint32Array(bytes, 0, 5), start = 20 + 8 * count;
  const Values = { values: Float32Array, cells: Float32Array, edges: Int32Array, categories: Uint16Array }[layer.kind] || Uint8Array;
  const data = { count, width, height, dx, dy, coords: new Int32Array(bytes, 20, 2 * count), values: new Values(bytes, start) };
  if (layer.kind === "cells") data.squares = new Map();
  raster(data, painter(layer, data));
  return data;
}
function shapes(geometries) {  // rings, lines and points; rings make holes by even-odd
  const data = { rings: new Path2D(), lines: new Path2D(), points: [] };
  const walk = (part, kind) => {
    if (!part.length) return;
    if (typeof part[0] === "number") data.points.push(part);
    else if (typeof part[0][0] === "number" && kind !== "MultiPoint") {
      const path = kind.includes("Polygon") ? data.rings : data.lines;
      part.forEach(([x, y], i) => i ? path.lineTo(x, y) : path.moveTo(x, y));
      if (path === data.rings) path.closePath();
    } else part.forEach(inner => walk(inner, kind));
  };
  const each = shape => shape && (shape.geometries ? shape.geometries.forEach(each) : walk(shape.coordinates, shape.type));
  geometries.forEach(each);
  return data;
}
function painter({ kind, scale, colors, map }, data) {  // the colour and the opacity of a tile
  const { values } = data, classes = colors.map(rgb);
  if (kind === "colours") return i => [...values.subarray(3 * i, 3 * i + 3), 255];
  if (kind === "classes") return i => [...classes[values[i] % classes.length], 255];
  if (kind === "categories") return i => values[i] < classes.length ? [...classes[values[i]], 255] : [0, 0, 0, 0];
  if (kind === "cells") {
    data.high = values.slice().sort()[Math.round(0.99 * (values.length - 1))] || 1;
    const steps = Array.from({ length: 257 }, (_, step) => [...colorAt(map, step / 256), 255]);
    return i => steps[Math.round(256 * Math.min(1, values[i] / data.high))];
  }
  if (kind !== "values") return null;
  const finite = values.filter(Number.isFinite), sorted = (scale === "signed" ? finite.map(Math.abs) : finite).sort();
  let [low, high] = [0.01, 0.99].map(share => sorted[Math.round(share * (sorted.length - 1))] || 0);
  if (scale === "signed") [low, high] = [-high, high];
  if (scale === "amount") low = Math.min(0, sorted[0] || 0);
  Object.assign(data, { low, high, constant: finite.length > 0 && finite.every(value => value === finite[0]), only: finite[0] });
  const share = value => Math.min(Math.max((value - low) / (high - low || 1), 0), 1);
  return i => Number.isFinite(values[i]) ? [...colorAt(colors, share(values[i])), 255 * strength(scale, share(values[i]))] : [0, 0, 0, 0];
}
function raster(data, paint) {  // a px for each tile, and which tile it is
  const { coords, count, dx, dy } = data, least = [Infinity, Infinity], most = [0, 0];
  for (let i = 0; i < 2 * count; i++) { least[i % 2] = Math.min(least[i % 2], coords[i]); most[i % 2] = Math.max(most[i % 2], coords[i]); }
  const [x0, y0] = count ? least : [0, 0], columns = Math.round((most[0] - x0) / dx) + 1, rows = Math.round((most[1] - y0) / dy) + 1;
  Object.assign(data, { x0, y0, columns, rows, index: new Int32Array(columns * rows).fill(-1) });
  const picture = new ImageData(columns, rows);
  for (let i = 0; i < count; i++) {
    const cell = Math.round((coords[2 * i] - x0) / dx) + columns * Math.round((coords[2 * i + 1] - y0) / dy);
    data.index[cell] = i;
    if (paint) picture.data.set(paint(i), 4 * cell);
  }
  if (!paint) return;
  data.picture = make("canvas", { width: columns, height: rows });
  data.picture.getContext("2d").putImageData(picture, 0, 0);
}
function tileAt({ x0, y0, dx, dy, columns, index, coords, width, height }, x, y) {
  const column = Math.floor((x - x0) / dx), i = column >= 0 && column < columns ? index[Math.floor((y - y0) / dy) * columns + column] ?? -1 : -1;
  return i >= 0 && x < coords[2 * i] + width && y < coords[2 * i + 1] + height ? i : -1;
}
async function turn(layer, on) {
  layer.on = layer.box.checked = on;
  try { if (on && !layer.data) layer.data = await load(layer); } catch (error) { layer.on = layer.box.checked = false; say(error.message); }
  legend(); draw(); note();
}
function panel(before, keys = null) {
  $("layers").replaceChildren(); $("pictures").replaceChildren(); legend();
  if (!slide) return;
  const groups = new Map(), remark = text => make("p", { className: "note" }, text);
  const grids = new Set(slide.layers.filter(layer => layer.kind === "grid").map(layer => layer.group)), empty = new Map();
  slide.layers.forEach((layer, number) => {
    const same = before && before.find(other => other.group === layer.group && other.name === layer.name);
    Object.assign(layer, { number, opacity: same ? same.opacity : layer.kind === "outlines" ? 0 : OPACITY[layer.scale] || 0.5, box: make("input", { type: "checkbox", onchange: () => turn(layer, layer.box.checked) }) });
    const opacity = make("input", { type: "range", min: layer.kind === "outlines" ? 0 : 0.05, max: 1, step: 0.05, value: layer.opacity, title: layer.kind === "outlines" ? "opacity of the filling" : "opacity",
      oninput: () => { layer.opacity = +opacity.value; if (layer.on) draw(); else turn(layer, true); } });
    const name = make("label", { title: layer.name, onclick: () => turn(layer, !layer.on) }, ...layer.color ? [swatch(layer.color)] : [], layer.words);
    if (!groups.has(layer.group)) groups.set(layer.group, make("details", { open: groups.size < 1 }, make("summary", { title: layer.group }, layer.group_words + (grids.size > 1 && grids.has(layer.group.split("/")[0]) ? ` (${layer.group.split("/")[0]})` : ""))));
    const group = groups.get(layer.group), wanted = keys ? among(keys, layer) : same || (!before && number === 0 && layer.kind === "outlines");
    if (layer.empty && !empty.has(layer.group)) empty.set(layer.group, make("details", { className: "empty" }, make("summary", {})));
    const into = layer.empty ? empty.get(layer.group) : group;
    into.append(make("div", { className: "layer" }, layer.box, name, opacity));
    if (wanted) { group.open = into.open = true; turn(layer, true); }
  });
  empty.forEach((part, group) => { part.firstChild.textContent = `${part.children.length - 1} empty on this slide`; groups.get(group).append(part); });
  $("layers").append(...groups.size ? groups.values() : [remark("No layers. To see layers, open a results folder of thinsection run, or pass --annotations.")]);
  if (slide.show) $("pictures").append(...slide.pictures.map(name => make("img", { src: at(slide.id, "pictures", name), alt: name, title: name })));
  else if (slide.pictures.length) $("pictures").append(remark(`Hidden, because these pictures may name a patient: ${slide.pictures.join(", ")}. Use --show-label to see them.`));
  $("pictures").append(...slide.notes.map(remark));
}
// the colours of a scale as they look over white
const faded = ({ colors, scale }) => colors.map((color, i) => `rgb(${rgb(color).map(value => Math.round(255 - (255 - value) * strength(scale, i / (colors.length - 1))))})`);
function legend() {
  const number = value => Math.abs(value) >= 1000 || value === 0 ? value.toFixed(0) : value.toPrecision(3);
  const boxes = (slide && !hidden ? slide.layers : []).filter(layer => layer.on && layer.data).map(layer => {
    const { data } = layer, box = make("div", {}, ...layer.color ? [swatch(layer.color)] : [], layer.kind === "cells" ? layer.group_words : layer.words);
    if (layer.kind === "values" && data.constant) box.append(": ", number(data.only));
    else if (layer.kind === "values") box.append(make("i", { className: "bar", style: `background:linear-gradient(90deg,${faded(layer)})` }),
      make("span", { className: "ends" }, make("span", {}, `≤ ${number(data.low)}`), make("span", {}, `≥ ${number(data.high)}`)));
    if (layer.kind === "colours") box.append(" 1, 2, 3 as red, green, blue");
    if (layer.kind === "cells" && data.isDense) {  // the values are numbers in squares
      const area = slide.mpp ? data.width * data.height * slide.mpp[0] * slide.mpp[1] / 1e6 : 0, high = area ? data.high / area : data.high;
      box.append(area ? ": per mm²" : `: in ${data.width} × ${data.height} px`, make("i", { className: "bar", style: `background:linear-gradient(90deg,${layer.map})` }),
        make("span", { className: "ends" }, make("span", {}, "0"), make("span", {}, `≥ ${number(high)}`)), make("span", { className: "note" }, `Zoom in for outlines: ${MOST_CELLS.toLocaleString("en")} cells at most`));
    } else if (layer.kind === "cells") layer.names.forEach((name, c) => box.append(make("br"), swatch(layer.colors[c]), name));
    if (layer.kind === "edges") box.append(`, drawn when at most ${MOST_EDGES.toLocaleString("en")} edges are visible`);
    const sizes = [];
    if (layer.kind === "classes" || layer.kind === "categories") for (const c of data.values) sizes[c] = (sizes[c] || 0) + 1;
    const named = c => layer.kind === "classes" ? c : layer.names[c] ?? "none", sign = c => c < layer.colors.length || layer.kind === "classes" ? [swatch(layer.colors[c % layer.colors.length])] : [];
    sizes.forEach((size, c) => box.append(make("br"), ...sign(c), `${named(c)}: ${size} tile${size === 1 ? "" : "s"}`));
    return box;
  });
  $("legend").replaceChildren(...boxes);
}

// ---- drawing ----
function draw() {
  const ratio = devicePixelRatio || 1, { clientWidth: width, clientHeight: height } = viewer.canvas, pen = over.getContext("2d");
  if (over.width !== Math.round(width * ratio) || over.height !== Math.round(height * ratio))
    Object.assign(over, { width: Math.round(width * ratio), height: Math.round(height * ratio), style: `width:${width}px;height:${height}px` });
  pen.setTransform(ratio, 0, 0, ratio, 0, 0); pen.clearRect(0, 0, width, height);
  if (!slide || !viewer.world.getItemAt(0)) return;
  const view = frame(), { x, y, k } = view;
  pen.imageSmoothingEnabled = false; pen.lineWidth = 1;
  for (const layer of hidden ? [] : slide.layers.filter(one => one.on && one.data)) {
    pen.save(); pen.translate(x, y); pen.globalAlpha = layer.opacity;
    (layer.kind === "outlines" ? outlines : layer.kind === "edges" ? edges : layer.kind === "cells" ? cells : tiles)(pen, layer, view);
    pen.restore();
  }
  pen.lineWidth = 3;
  for (const mark of found) { pen.strokeStyle = mark.color; pen.strokeRect(x + mark.x * k, y + mark.y * k, Math.max(6, mark.width * k), Math.max(6, mark.height * k)); }
  drawMarks(pen, view);
  measure(k);
}
function outlines(pen, { data, color, opacity }, { k }) {
  pen.scale(k, k); pen.lineWidth = 2 / k; pen.strokeStyle = pen.fillStyle = color; pen.lineJoin = "round";
  pen.globalAlpha = opacity; if (opacity) pen.fill(data.rings, "evenodd");
  pen.globalAlpha = 1; pen.stroke(data.rings); pen.stroke(data.lines);
  for (const [x, y] of data.points) { pen.beginPath(); pen.arc(x, y, 4 / k, 0, 7); pen.fill(); }
}
function tiles(pen, { data, kind }, view) {
  const { k } = view, [sx, sy] = [data.dx * k, data.dy * k], offset = [data.x0 + (data.width - data.dx) / 2, data.y0 + (data.height - data.dy) / 2];
  if (data.picture) pen.drawImage(data.picture, offset[0] * k, offset[1] * k, data.columns * sx, data.rows * sy);
  if (kind !== "grid") return;
  pen.strokeStyle = pen.fillStyle = GRID; pen.beginPath();
  visible(data, view, i => pen.rect(data.coords[2 * i] * k, data.coords[2 * i + 1] * k, data.width * k, data.height * k));
  if (sx < LEAST_BORDER_PX) pen.fill(); else pen.stroke();
}
function cells(pen, layer, view) {  // a picture of the outlines, which moves with the view and is made anew when that rests; or the density of cells
  const { data, opacity } = layer, { k } = view;
  let count = 0;
  visible(data, view, i => { count += data.values[i]; });
  const isDense = count > MOST_CELLS;
  if (data.isDense !== isDense) { data.isDense = isDense; legend(); }
  if (isDense) { clearTimeout(data.later); data.shot = data.next = null; return tiles(pen, layer, view); }
  const [left, top, right, bottom] = [-view.x / k, -view.y / k, (view.width - view.x) / k, (view.height - view.y) / k], { shot } = data;
  const isFit = shot && shot.k === k && shot.opacity === opacity && !shot.isStale && left >= shot.left && top >= shot.top && right <= shot.left + shot.width && bottom <= shot.top + shot.height;
  if (!isFit) { clearTimeout(data.later); data.later = setTimeout(() => paint(layer), shot || data.next ? REST_MS : 0); }
  if (!shot || shot.isPartial) tiles(pen, layer, view);
  pen.globalAlpha = 1; pen.imageSmoothingEnabled = true;
  if (shot) pen.drawImage(shot.canvas, shot.left * k, shot.top * k, shot.width * k, shot.height * k);
}
function paint(layer) {  // makes a new picture, some cells in each frame, so that the view can go on moving
  const isShown = () => layer.on && slide && slide.layers.includes(layer), { data } = layer;
  if (!isShown()) return;
  const next = data.next = blank(layer, frame());
  const go = () => {
    if (data.next !== next || !isShown()) return;  // another one was begun, or the slide has changed
    for (let left = FRAME_CELLS; left > 0 && next.squares.length; ) left -= outline(layer, next, ...next.squares.pop());
    if (next.squares.length) return requestAnimationFrame(go);
    data.shot = next; data.next = null; draw();
  };
  go();
}
function blank(layer, { x, y, k, width, height }) {  // a picture with a quarter of the view around it, and the squares that it lacks
  const ratio = devicePixelRatio || 1, canvas = make("canvas", { width: Math.ceil(1.5 * width * ratio), height: Math.ceil(1.5 * height * ratio) });
  const shot = { canvas, k, ratio, opacity: layer.opacity, left: (-x - width / 4) / k, top: (-y - height / 4) / k, width: canvas.width / ratio / k, height: canvas.height / ratio / k, isStale: false, isPartial: false, squares: [] };
  const range = (from, size, most) => [Math.max(0, Math.floor(from / SQUARE_PX)), Math.min(Math.floor((from + size) / SQUARE_PX), Math.floor(most / SQUARE_PX))];
  const [left, right] = range(shot.left, shot.width, slide.size[0]), [top, bottom] = range(shot.top, shot.height, slide.size[1]);
  for (let row = top; row <= bottom; row++) for (let column = left; column <= right; column++) shot.squares.push([column, row]);
  return shot;
}
function outline(layer, shot, column, row) {  // draws a square of a picture; returns its number of cells
  const paths = square(layer, column, row), { k, ratio } = shot, pen = shot.canvas.getContext("2d");
  if (!paths) { shot.isPartial = true; return 0; }
  pen.setTransform(k * ratio, 0, 0, k * ratio, (column * SQUARE_PX - shot.left) * k * ratio, (row * SQUARE_PX - shot.top) * k * ratio);
  pen.lineWidth = 1.5 / k; pen.lineJoin = "round";
  paths.forEach((path, c) => {
    pen.strokeStyle = pen.fillStyle = layer.colors[c] || CLASSLESS;
    pen.globalAlpha = shot.opacity / 2; pen.fill(path); pen.globalAlpha = 1; pen.stroke(path);
  });
  return paths.count;
}
function square(layer, column, row) {  // paths of a square by class; null until they are here
  const { data } = layer, key = `${column},${row}`;
  if (data.squares.has(key)) return data.squares.get(key);
  data.squares.set(key, null);
  if (data.squares.size > MOST_SQUARES) data.squares.delete(data.squares.keys().next().value);
  get(at(slide.id, "layers", layer.number, column, row)).then(answer => answer.arrayBuffer()).then(bytes => {
    const count = new Uint32Array(bytes, 0, 1)[0], codes = new Uint32Array(bytes, 4, count), first = new Uint32Array(bytes, 4 + 4 * count, count + 1), points = new Float32Array(bytes, 8 + 8 * count), paths = Object.assign([], { count });
    for (let i = 0; i < count; i++) {
      const path = paths[codes[i]] = paths[codes[i]] || new Path2D();
      if (first[i + 1] - first[i] === 1) path.rect(points[2 * first[i]] - 2, points[2 * first[i] + 1] - 2, 4, 4);  // only a centre
      else { for (let p = first[i]; p < first[i + 1]; p++) p === first[i] ? path.moveTo(points[2 * p], points[2 * p + 1]) : path.lineTo(points[2 * p], points[2 * p + 1]); path.closePath(); }
    }
    data.squares.set(key, paths);
    for (const shot of [data.shot, data.next]) if (shot) shot.isStale = true;
    draw();
  }).catch(error => { data.squares.delete(key); layer.on = layer.box.checked = false; say(error.message); draw(); });
  return null;
}
function edges(pen, { data }, view) {
  const { k } = view, seen = new Uint8Array(data.count);
  const centre = i => [(data.coords[2 * i] + data.width / 2) * k, (data.coords[2 * i + 1] + data.height / 2) * k];
  visible(data, view, i => { seen[i] = 1; });
  let count = 0;
  pen.beginPath(); pen.strokeStyle = FOUND;
  for (let e = 0; e < data.values.length && count <= MOST_EDGES; e += 2) {
    const [a, b] = data.values.subarray(e, e + 2);
    if (seen[a] || seen[b]) { count++; pen.moveTo(...centre(a)); pen.lineTo(...centre(b)); }
  }
  if (count <= MOST_EDGES) pen.stroke();
}
function visible(data, { x, y, k, width, height }, each) {
  const range = (from, size, first, step, most) => [Math.max(0, Math.floor((-from / k - first) / step) - 1), Math.min(most, Math.ceil(((size - from) / k - first) / step) + 1)];
  const [left, right] = range(x, width, data.x0, data.dx, data.columns), [top, end] = range(y, height, data.y0, data.dy, data.rows);
  for (let row = top; row < end; row++) for (let cell = row * data.columns + left; cell < row * data.columns + right; cell++)
    if (data.index[cell] >= 0) each(data.index[cell]);
}
function measure(k) {  // scale bar, resolution, nominal magnification: 10x is 1 µm/px
  const mpp = slide.mpp && slide.mpp[0], steps = [-1, 0, 1, 2, 3, 4, 5].flatMap(power => [1, 2, 5].map(step => step * 10 ** power));
  const length = steps.find(step => step * k / (mpp || 1) >= 80) || 1;
  $("scale").style.width = `${length * k / (mpp || 1)}px`;
  $("scale").firstElementChild.textContent = !mpp ? `${length} px` : length >= 1000 ? `${length / 1000} mm` : `${+length.toPrecision(1)} µm`;
  $("zoom").textContent = mpp ? `${(mpp / k).toPrecision(3)} µm/px, ${+(10 * k / mpp).toPrecision(2)}x` : `${(100 * k).toPrecision(3)} %`;
}
for (const name of ["update-viewport", "open", "resize"]) viewer.addHandler(name, () => { requestAnimationFrame(draw); note(); });

// ---- marks: points and boxes, in level-0 px, that are saved as GeoJSON for QuPath ----
const MARK = "#c2185b", MARK_RGB = [194, 24, 91], marked = new Map();  // slide -> its marks
let marking = "", corner = null, unsaved = false, lastClass = "";
const marksOf = () => slide && marked.get(slide.id) || [];
const numbers = ({ kind, x, y, width, height }) => kind === "box" ? [x, y, width, height] : [x, y];
const boxOf = (a, b) => {  // within the slide
  const clip = ([x, y]) => [Math.min(Math.max(x, 0), slide.size[0]), Math.min(Math.max(y, 0), slide.size[1])], [[x0, y0], [x1, y1]] = [clip(a), clip(b)];
  return { kind: "box", x: Math.min(x0, x1), y: Math.min(y0, y1), width: Math.abs(x1 - x0), height: Math.abs(y1 - y0) };
};
function mark(kind = "") {
  marking = marking === kind ? "" : kind; corner = null;
  document.body.classList.toggle("marking", marking !== "");
  for (const name of ["point", "box"]) $(`mark-${name}`).setAttribute("aria-pressed", marking === name);
  $("said").textContent = marking === "box" ? "Drag over the slide. Esc stops." : marking ? "Click on the slide. Esc stops." : "";
}
function addMark(one) {
  marked.set(slide.id, [...marksOf(), { ...one, id: crypto.randomUUID(), name: lastClass }]);
  unsaved = true; listMarks(); draw();
}
function listMarks() {
  $("marks").hidden = !marksOf().length;
  $("marks").querySelector("ol").replaceChildren(...marksOf().map(one => {
    const name = make("input", { value: one.name, placeholder: "class", oninput: () => { one.name = lastClass = name.value; unsaved = true; draw(); } });
    name.setAttribute("aria-label", "Class");
    return make("li", {}, make("button", { title: "show", onclick: () => jump({ width: 512, height: 512, ...one }) }, `${one.kind} ${numbers(one).join(", ")}`), name,
      make("button", { title: "remove", onclick: () => { marked.set(slide.id, marksOf().filter(other => other !== one)); unsaved = true; listMarks(); draw(); } }, "×"));
  }));
}
function drawMarks(pen, { x, y, k }) {
  pen.strokeStyle = pen.fillStyle = MARK; pen.lineWidth = 2; pen.font = "600 13px system-ui, sans-serif";
  for (const one of [...marksOf(), ...corner && corner.box ? [corner.box] : []]) {
    const [left, top] = [x + one.x * k, y + one.y * k];
    pen.beginPath();
    if (one.kind === "box") pen.rect(left, top, one.width * k, one.height * k); else { pen.arc(left, top, 6, 0, 7); pen.moveTo(left - 10, top); pen.lineTo(left + 10, top); pen.moveTo(left, top - 10); pen.lineTo(left, top + 10); }
    pen.stroke();
    if (!one.name) continue;
    pen.save(); pen.strokeStyle = "#ffffffd0"; pen.lineWidth = 4; pen.lineJoin = "round";
    pen.strokeText(one.name, left + 12, top - 6); pen.fillText(one.name, left + 12, top - 6); pen.restore();
  }
}
function marksAsGeoJson() {
  const shape = ({ kind, x, y, width: w, height: h }) => kind === "point" ? { type: "Point", coordinates: [x, y] } : { type: "Polygon", coordinates: [[[x, y], [x + w, y], [x + w, y + h], [x, y + h], [x, y]]] };
  const features = marksOf().map(one => ({ type: "Feature", id: one.id, geometry: shape(one),
    properties: { objectType: "annotation", ...one.name && { classification: { name: one.name, color: MARK_RGB } } } }));
  return JSON.stringify({ type: "FeatureCollection", features }, null, 1);
}
function saveMarks() {
  const href = URL.createObjectURL(new Blob([marksAsGeoJson()], { type: "application/geo+json" }));
  make("a", { href, download: `${slide.id}.geojson` }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10000);
  unsaved = false;
  $("said").textContent = `Saved ${slide.id}.geojson (level-0 px). QuPath opens it on this slide.`;
}
$("copy-link").onclick = copyLink; $("copy-place").onclick = copyPlace; $("save-marks").onclick = saveMarks;
$("mark-point").onclick = () => mark("point"); $("mark-box").onclick = () => mark("box");
viewer.addHandler("canvas-press", event => { if (marking === "box" && slide) corner = { from: place(event.position) }; });
viewer.addHandler("canvas-drag", event => {
  if (!corner) return;
  event.preventDefaultAction = true;
  corner.box = boxOf(corner.from, place(event.position));
  draw();
});
viewer.addHandler("canvas-release", () => {
  const box = corner && corner.box;
  corner = null;
  if (box && box.width && box.height) { addMark(box); mark(); }
});
window.addEventListener("beforeunload", event => { if (unsaved) event.preventDefault(); });

// ---- pointer, similar tiles, keys ----
let pointer = null;
const place = (position, { x, y, k } = frame()) => [Math.floor((position.x - x) / k), Math.floor((position.y - y) / k)];
new OpenSeadragon.MouseTracker({ element: viewer.container, moveHandler: event => {
  if (!slide || !viewer.world.getItemAt(0)) return;
  const [x, y] = place(event.position), told = [`x ${x}, y ${y}`];
  pointer = [x, y];
  for (const { data, words, kind, names } of slide.layers.filter(layer => layer.on && layer.data && ["values", "classes", "categories"].includes(layer.kind))) {
    const i = tileAt(data, x, y);
    if (i >= 0) told.push(`${words} ${kind === "categories" ? names[data.values[i]] ?? "none" : +data.values[i].toPrecision(4)}`);
  }
  $("place").textContent = told.join(" · ");
} });
viewer.addHandler("canvas-click", event => {
  if (!event.quick || !slide || !viewer.world.getItemAt(0)) return;
  const [x, y] = place(event.position);
  if (marking === "point") { if (x >= 0 && y >= 0 && x < slide.size[0] && y < slide.size[1]) addMark({ kind: "point", x, y }); }
  else if (!marking && slide.features.length) ask(x, y);
});

async function ask(x, y) {  // lines of JSON come slide by slide: the last one has all that was found
  const { id, features } = slide, chosen = Math.max(0, features.indexOf($("features").value)), decoder = new TextDecoder();
  if (asking) asking.abort();
  const { signal } = asking = new AbortController();
  $("features").replaceChildren(...features.map(name => make("option", { selected: name === features[chosen] }, name)));
  $("features").onchange = () => open(id, () => ask(x, y));
  try {
    const reader = (await get(at(id, "similar", chosen, x, y), { signal })).body.getReader();
    let rest = "";
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const lines = (rest + decoder.decode(part.value, { stream: true })).split("\n");
      rest = lines.pop();
      if (lines.length) show(JSON.parse(lines.at(-1)));
    }
  } catch { if (!signal.aborted) close(); }  // no tile is there
}
function show(similar) {
  const { tile } = similar, outline = () => {
    found = [...similar.slide, ...similar.cohort, tile].filter(one => one.slide === slide.id).map(one => ({ ...one, color: one === tile ? ASKED : FOUND }));
    draw();
  };
  const words = one => one === tile ? "this tile" : one.similarity.toFixed(3) + (one.slide === tile.slide ? "" : ` ${one.slide}`);
  const button = one => make("button", { title: `${one.slide} at ${one.x}, ${one.y}: cosine ${one.similarity.toFixed(4)}`, onclick: () => open(one.slide, () => { jump(one); outline(); }) },
    make("img", { src: at(one.slide, "crop", one.x, one.y, one.width, one.height), loading: "lazy", alt: "" }), words(one));
  $("similar").hidden = false;
  $("progress").textContent = similar.done < similar.of ? `${similar.done} of ${similar.of} slides` : `of ${similar.of} slide${similar.of > 1 ? "s" : ""}`;
  const left = Object.entries(similar.left_out);
  if (left.length) $("progress").textContent += `; ${left.length} left out`;
  $("progress").title = left.map(([name, why]) => `${name}: ${why}`).join("\n");
  $("of-slide").replaceChildren(make("b", {}, "this slide"), ...[tile, ...similar.slide].map(button));
  $("of-cohort").replaceChildren(...similar.cohort.length ? [make("b", {}, "cohort"), ...similar.cohort.map(button)] : []);
  outline();
}
function close() { if (asking) asking.abort(); mark(); found = []; $("similar").hidden = true; draw(); }
Object.assign($("close"), { onclick: close }); $("keys").onclick = () => $("help").showModal(); $("help").onclick = () => $("help").close();

const step = by => { const next = ids[ids.indexOf($("name").textContent) + by]; if (next) open(next); };
const pan = (x, y) => viewer.viewport.panBy(viewer.viewport.deltaPointsFromPixels(new Point(x, y))), zoom = factor => viewer.viewport.zoomBy(factor);
const power = x => { if (slide.mpp) viewer.viewport.zoomTo(viewer.viewport.imageToViewportZoom(x * slide.mpp[0] / 10)); };
const fade = by => { for (const layer of slide.layers.filter(one => one.on)) layer.opacity = Math.min(1, Math.max(layer.kind === "outlines" ? 0 : 0.05, layer.opacity + by)); draw(); };
const KEYS = { ArrowLeft: () => pan(-90, 0), ArrowRight: () => pan(90, 0), ArrowUp: () => pan(0, -90), ArrowDown: () => pan(0, 90),
  "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), 0: () => viewer.viewport.goHome(), 1: () => power(40), 2: () => power(20), 4: () => power(10),
  n: () => step(1), p: () => step(-1), "/": () => $("filter").focus(), "?": () => $("help").showModal(),
  " ": () => { hidden = !hidden; legend(); draw(); }, c: () => { if (pointer) copy(pointer.join(", "), `${pointer.join(", ")} (level-0 px)`); }, m: () => mark("point"), b: () => mark("box"),
  "[": () => fade(-0.1), "]": () => fade(0.1), Escape: close };
document.addEventListener("keydown", event => {
  const typing = event.target.matches("input:not([type=checkbox]), select") && event.key !== "Escape", known = KEYS[event.key] && (slide || "np/?".includes(event.key));
  if (!known || typing || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault(); event.target.blur(); KEYS[event.key]();
  if (slide) viewer.viewport.applyConstraints();
});
$("filter").oninput = () => { for (const row of $("list").children) row.hidden = !row.dataset.id.toLowerCase().includes($("filter").value.toLowerCase()); };

const listed = id => {
  const button = make("button", { onclick: () => open(id) }, make("img", { src: at(id, "thumbnail"), loading: "lazy", alt: "" }), id);
  const row = make("li", {}, button);
  row.dataset.id = id;
  return row;
};
async function look() {  // what finished since the viewer started; nothing else of the page changes
  const news = await (await get("news")).json(), fresh = news.new.filter(id => !ids.includes(id));
  $("index").hidden = !news.index;
  ids.push(...fresh);
  $("list").append(...fresh.map(listed));
  const started = new Set(news.new);
  for (const row of $("list").children) row.classList.toggle("new", started.has(row.dataset.id));
  $("count").textContent = ids.length + (started.size ? `, ${started.size} new` : "");
  document.body.classList.toggle("alone", ids.length === 1 && !news.index);
  if (!ids.length) say("No slide has a result yet. This page lists slides as they finish.");
  else if (!slide && fresh.length) open(ids[0]);
  if (slide && news.version !== version) {
    const facts = await (await get(at(slide.id))).json();
    if (slide.id === facts.id && facts.layers.length !== slide.layers.length) {
      const before = slide.layers.filter(layer => layer.on);
      slide = facts;
      panel(before);
    }
  }
  version = news.version;
}
const NEWS_MS = 15000;
async function watch() {  // a large folder takes time to read: at most 2 % of the time is spent on it
  const begin = performance.now();
  if (document.visibilityState === "visible") await look().catch(() => {});
  setTimeout(watch, Math.max(NEWS_MS, 50 * (performance.now() - begin)));
}

(async () => {
  ids = await (await get("slides")).json();
  $("list").append(...ids.map(listed));
  if (!follow(location.hash) && ids.length) open(ids[0]);  // its facts are read while the news are
  await look();
  setTimeout(watch, NEWS_MS);
})().catch(error => say(error.message));
