// A link a.viewer has its place in the viewer after "#". `thinsection view` names its address in
// each page that it serves. A page from disk cannot start a viewer: it shows the command instead.
const viewerAddress = (document.querySelector("meta[name={{ viewer_meta }}]") || {}).content;
// an address that was typed may hold a "%" that is no escape
const decoded = text => { try { return decodeURIComponent(text); } catch { return text; } };
const viewerPlace = (slide, layers = [], middle = null) => {
  const place = new URLSearchParams(slide ? { slide } : {});
  if (middle) ["x", "y", "downsample"].forEach((name, n) => place.append(name, [...middle, 1][n]));
  layers.forEach(layer => place.append("layer", layer));
  return `#${place}`;
};
const viewerLink = (place, text) => Object.assign(document.createElement("a"), { className: "viewer", href: (viewerAddress || "") + place, textContent: text });
const aimViewerLinks = inside => inside.querySelectorAll("a.viewer").forEach(link => { if (viewerAddress) link.href = viewerAddress + link.getAttribute("href"); });
const viewerCommand = hash => {
  const path = location.protocol === "file:" ? new URL("./", new URL({{ home|tojson }}, location.href)).pathname : "/RESULTS/";
  const windows = /^\/[A-Za-z]:\//.test(path), quote = text => windows ? `"${text}"` : `'${text.replaceAll("'", "'\\''")}'`;
  const folder = decoded(path).slice(windows ? 1 : 0, -1);
  return `thinsection view ${quote(location.protocol === "file:" ? folder : "RESULTS")}${hash.length > 1 ? ` --at ${quote(hash.slice(1))}` : ""}`;
};
document.addEventListener("click", event => {
  const link = event.target.closest("a.viewer");
  if (!link || viewerAddress) return;
  event.preventDefault();
  const box = document.createElement("dialog"), words = document.createElement("p"), field = document.createElement("textarea"), copy = document.createElement("button"), close = document.createElement("button");
  box.id = "viewer-command";
  words.textContent = "This page was opened from disk. To look at the slide, run this command in a terminal, and open the address that it prints:";
  Object.assign(field, { readOnly: true, rows: 3, value: viewerCommand(link.getAttribute("href")) });
  field.setAttribute("aria-label", "Command");
  field.style.cssText = "width: min(720px, 80vw); font: 13px/1.5 ui-monospace, monospace; display: block; margin: 8px 0; overflow-wrap: anywhere";
  copy.textContent = "Copy";
  close.textContent = "Close";
  copy.addEventListener("click", async () => {
    field.select();
    try { await navigator.clipboard.writeText(field.value); copy.textContent = "Copied"; } catch { copy.textContent = "Press Ctrl+C"; }
  });
  close.addEventListener("click", () => box.close());
  box.addEventListener("close", () => box.remove());
  box.append(words, field, copy, " ", close);
  document.body.append(box);
  box.showModal();
});
aimViewerLinks(document);
