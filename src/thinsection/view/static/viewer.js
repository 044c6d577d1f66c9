"use strict";
const $ = id => document.getElementById(id);
const make = (tag, set = {}, ...inside) => { const node = Object.assign(document.createElement(tag), set); node.append(...inside); return node; };
const at = (slide, ...rest) => ["slides", encodeURIComponent(slide), ...rest].join("/");
const say = text => { $("message").textContent = text; };
const swatch = color => make("i", { className: "swatch", style: `background:${color}` });
const VIRIDIS = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725"];
const CLASSES = ["#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf", "#7f7f7f", "#4a1486", "#f7e000"];
const GRID = "#2060c8", ASKED = "#d95f02", FOUND = "#111111", MOST_EDGES = 40000, LEAST_BORDER_PX = 7;
let ids = [], slide = null, hidden = false, marks = [], asking = null, opening = 0;

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

async function open(id, then = () => {}) {
  if (slide && slide.id === id) return then();
  const turn = ++opening, before = slide && slide.layers.filter(layer => layer.on);
  say(""); $("name").textContent = id; document.title = `${id} - thinsection`; history.replaceState(null, "", "#" + encodeURIComponent(id));
  for (const row of $("list").children) row.classList.toggle("on", row.dataset.id === id);
  try {
    const facts = await (await get(at(id))).json();
    if (turn !== opening) return;
    slide = facts; marks = [];
  } catch (error) {
    if (turn === opening) { viewer.close(); slide = null; panel(); draw(); say(error.message); }
    return;
  }
  viewer.addOnceHandler("open", then);
  viewer.open(source(slide));
  panel(before);
  const mpp = slide.mpp ? [...new Set(slide.mpp.map(value => +value.toPrecision(4)))].join(" × ") + " µm/px" : "unknown resolution";
  $("facts").textContent = `${slide.size.join(" × ")} px, ${mpp}${slide.power ? `, ${slide.power}x` : ""}`;
}
function frame() {  // level-0 px -> px of the overlay: x + k * x_l0
  const [zero, end] = [new Point(0, 0), new Point(...slide.size)].map(point => viewer.viewport.imageToViewerElementCoordinates(point));
  return { x: zero.x, y: zero.y, k: (end.x - zero.x) / slide.size[0], width: viewer.canvas.clientWidth, height: viewer.canvas.clientHeight };
}
const jump = ({ x, y, width: w, height: h }) => viewer.viewport.fitBounds(viewer.viewport.imageToViewportRectangle(x - 2.5 * w, y - 2.5 * h, 6 * w, 6 * h));

// ---- layers ----
const rgb = hex => [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16));
function viridis(share) {
  const place = Math.min(Math.max(share, 0), 1) * (VIRIDIS.length - 1), i = Math.min(Math.floor(place), VIRIDIS.length - 2);
  const [a, b] = [rgb(VIRIDIS[i]), rgb(VIRIDIS[i + 1])];
  return a.map((value, c) => value + (b[c] - value) * (place - i));
}
async function load(layer) {
  const answer = await get(at(slide.id, "layers", layer.number));
  if (layer.kind === "outlines") return shapes(await answer.json());
  const bytes = await answer.arrayBuffer(), [count, width, height, dx, dy] = new Uint32Array(bytes, 0, 5), start = 20 + 8 * count;
  const Values = { values: Float32Array, edges: Int32Array }[layer.kind] || Uint8Array;
  const data = { count, width, height, dx, dy, coords: new Int32Array(bytes, 20, 2 * count), values: new Values(bytes, start) };
  raster(data, painter(layer.kind, data));
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
function painter(kind, data) {  // the colour of a tile
  const { values } = data, colors = CLASSES.map(rgb);
  if (kind === "colours") return i => values.subarray(3 * i, 3 * i + 3);
  if (kind === "classes") return i => colors[values[i] % CLASSES.length];
  if (kind !== "values") return null;
  const sorted = values.filter(Number.isFinite).sort(), [low, high] = [0.01, 0.99].map(share => sorted[Math.round(share * (sorted.length - 1))] || 0);
  Object.assign(data, { low, high, constant: sorted.length > 0 && sorted[0] === sorted.at(-1) });
  return i => Number.isFinite(values[i]) ? viridis((values[i] - low) / (high - low || 1)) : [200, 200, 200];
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
    if (paint) picture.data.set([...paint(i), 255], 4 * cell);
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
  legend(); draw();
}
function panel(before) {
  $("layers").replaceChildren(); $("pictures").replaceChildren(); legend();
  if (!slide) return;
  const groups = new Map(), note = text => make("p", { className: "note" }, text);
  slide.layers.forEach((layer, number) => {
    const same = before && before.find(other => other.group === layer.group && other.name === layer.name);
    Object.assign(layer, { number, opacity: same ? same.opacity : 0.5, box: make("input", { type: "checkbox", onchange: () => turn(layer, layer.box.checked) }) });
    const opacity = make("input", { type: "range", min: 0.05, max: 1, step: 0.05, value: layer.opacity, title: "opacity",
      oninput: () => { layer.opacity = +opacity.value; if (layer.on) draw(); else turn(layer, true); } });
    const name = make("label", { title: layer.name, onclick: () => turn(layer, !layer.on) }, ...layer.color ? [swatch(layer.color)] : [], layer.words);
    if (!groups.has(layer.group)) groups.set(layer.group, make("details", { open: groups.size < 2 }, make("summary", {}, layer.group.replace("/", " · "))));
    const group = groups.get(layer.group), wanted = same || (!before && number === 0 && layer.kind === "outlines");
    group.append(make("div", { className: "layer" }, layer.box, name, opacity));
    if (wanted) { group.open = true; turn(layer, true); }
  });
  $("layers").append(...groups.size ? groups.values() : [note("No layers. To see layers, open a results folder of thinsection run, or pass --annotations.")]);
  if (slide.show) $("pictures").append(...slide.pictures.map(name => make("img", { src: at(slide.id, "pictures", name), alt: name, title: name })));
  else if (slide.pictures.length) $("pictures").append(note(`Hidden, because these pictures may name a patient: ${slide.pictures.join(", ")}. Use --show-label to see them.`));
  $("pictures").append(...slide.notes.map(note));
}
function legend() {
  const number = value => Math.abs(value) >= 1000 || value === 0 ? value.toFixed(0) : value.toPrecision(3);
  const boxes = (slide && !hidden ? slide.layers : []).filter(layer => layer.on && layer.data).map(layer => {
    const { data } = layer, box = make("div", {}, ...layer.color ? [swatch(layer.color)] : [], layer.words);
    if (layer.kind === "values" && data.constant) box.append(": ", swatch(VIRIDIS[0]), number(data.low));
    else if (layer.kind === "values") box.append(make("i", { className: "bar", style: `background:linear-gradient(90deg,${VIRIDIS})` }),
      make("span", { className: "ends" }, make("span", {}, `≤ ${number(data.low)}`), make("span", {}, `≥ ${number(data.high)}`)));
    if (layer.kind === "colours") box.append(" 1, 2, 3 as red, green, blue");
    if (layer.kind === "edges") box.append(`, drawn when at most ${MOST_EDGES.toLocaleString("en")} edges are visible`);
    const sizes = [];
    if (layer.kind === "classes") for (const c of data.values) sizes[c] = (sizes[c] || 0) + 1;
    sizes.forEach((size, c) => box.append(make("br"), swatch(CLASSES[c % CLASSES.length]), `${c}: ${size} tile${size === 1 ? "" : "s"}`));
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
    (layer.kind === "outlines" ? outlines : layer.kind === "edges" ? edges : tiles)(pen, layer, view);
    pen.restore();
  }
  pen.lineWidth = 3;
  for (const mark of marks) { pen.strokeStyle = mark.color; pen.strokeRect(x + mark.x * k, y + mark.y * k, Math.max(6, mark.width * k), Math.max(6, mark.height * k)); }
  measure(k);
}
function outlines(pen, { data, color, opacity }, { k }) {
  pen.scale(k, k); pen.lineWidth = 2 / k; pen.strokeStyle = pen.fillStyle = color; pen.lineJoin = "round";
  pen.globalAlpha = opacity * 0.45; pen.fill(data.rings, "evenodd");
  pen.globalAlpha = Math.min(1, opacity * 2); pen.stroke(data.rings); pen.stroke(data.lines);
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
for (const name of ["update-viewport", "open", "resize"]) viewer.addHandler(name, () => requestAnimationFrame(draw));

// ---- pointer, similar tiles, keys ----
const place = (position, { x, y, k } = frame()) => [Math.floor((position.x - x) / k), Math.floor((position.y - y) / k)];
new OpenSeadragon.MouseTracker({ element: viewer.container, moveHandler: event => {
  if (!slide || !viewer.world.getItemAt(0)) return;
  const [x, y] = place(event.position), told = [`x ${x}, y ${y}`];
  for (const { data, name } of slide.layers.filter(layer => layer.on && layer.data && ["values", "classes"].includes(layer.kind))) {
    const i = tileAt(data, x, y);
    if (i >= 0) told.push(`${name} ${+data.values[i].toPrecision(4)}`);
  }
  $("place").textContent = told.join(" · ");
} });
viewer.addHandler("canvas-click", event => { if (event.quick && slide && slide.features.length) ask(...place(event.position)); });

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
function show(found) {
  const { tile } = found, mark = () => {
    marks = [...found.slide, ...found.cohort, tile].filter(one => one.slide === slide.id).map(one => ({ ...one, color: one === tile ? ASKED : FOUND }));
    draw();
  };
  const words = one => one === tile ? "this tile" : one.similarity.toFixed(3) + (one.slide === tile.slide ? "" : ` ${one.slide}`);
  const button = one => make("button", { title: `${one.slide} at ${one.x}, ${one.y}: cosine ${one.similarity.toFixed(4)}`, onclick: () => open(one.slide, () => { jump(one); mark(); }) },
    make("img", { src: at(one.slide, "crop", one.x, one.y, one.width, one.height), loading: "lazy", alt: "" }), words(one));
  $("similar").hidden = false;
  $("progress").textContent = found.done < found.of ? `${found.done} of ${found.of} slides` : `of ${found.of} slide${found.of > 1 ? "s" : ""}`;
  $("of-slide").replaceChildren(make("b", {}, "this slide"), ...[tile, ...found.slide].map(button));
  $("of-cohort").replaceChildren(...found.cohort.length ? [make("b", {}, "cohort"), ...found.cohort.map(button)] : []);
  mark();
}
function close() { if (asking) asking.abort(); marks = []; $("similar").hidden = true; draw(); }
Object.assign($("close"), { onclick: close }); $("keys").onclick = () => $("help").showModal(); $("help").onclick = () => $("help").close();

const step = by => { const next = ids[ids.indexOf($("name").textContent) + by]; if (next) open(next); };
const pan = (x, y) => viewer.viewport.panBy(viewer.viewport.deltaPointsFromPixels(new Point(x, y))), zoom = factor => viewer.viewport.zoomBy(factor);
const power = x => { if (slide.mpp) viewer.viewport.zoomTo(viewer.viewport.imageToViewportZoom(x * slide.mpp[0] / 10)); };
const fade = by => { for (const layer of slide.layers.filter(one => one.on)) layer.opacity = Math.min(1, Math.max(0.05, layer.opacity + by)); draw(); };
const KEYS = { ArrowLeft: () => pan(-90, 0), ArrowRight: () => pan(90, 0), ArrowUp: () => pan(0, -90), ArrowDown: () => pan(0, 90),
  "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), 0: () => viewer.viewport.goHome(), 1: () => power(40), 2: () => power(20), 4: () => power(10),
  n: () => step(1), p: () => step(-1), "/": () => $("filter").focus(), "?": () => $("help").showModal(),
  " ": () => { hidden = !hidden; legend(); draw(); }, "[": () => fade(-0.1), "]": () => fade(0.1), Escape: close };
document.addEventListener("keydown", event => {
  const typing = event.target.matches("input[type=search], input[type=range], select") && event.key !== "Escape", known = KEYS[event.key] && (slide || "np/?".includes(event.key));
  if (!known || typing || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault(); event.target.blur(); KEYS[event.key]();
  if (slide) viewer.viewport.applyConstraints();
});
$("filter").oninput = () => { for (const row of $("list").children) row.hidden = !row.dataset.id.toLowerCase().includes($("filter").value.toLowerCase()); };

(async () => {
  ids = await (await get("slides")).json();
  $("count").textContent = ids.length;
  document.body.classList.toggle("alone", ids.length === 1);
  for (const id of ids) {
    const button = make("button", { onclick: () => open(id) }, make("img", { src: at(id, "thumbnail"), loading: "lazy", alt: "" }), id);
    $("list").appendChild(make("li", {}, button)).dataset.id = id;
  }
  const wanted = decodeURIComponent(location.hash.slice(1));
  open(ids.includes(wanted) ? wanted : ids[0]);
})().catch(error => say(error.message));
