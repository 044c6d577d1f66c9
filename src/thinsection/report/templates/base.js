const natural = new Intl.Collator(undefined, { numeric: true });
// Rows are shown 500 to a page. Those of a page are drawn fifty at a time as they come into sight;
// `more` lies below those that are drawn, and `pager` is hidden where one page is enough.
const PAGE_ROWS = 500;
const paged = (frame, more, pager) => {
  let body = null, wanted = [], first = 0, drawn = 0;
  const end = () => Math.min(first + PAGE_ROWS, wanted.length);
  const fill = () => {
    while (drawn < end() && more.getBoundingClientRect().top < frame.getBoundingClientRect().bottom + 400) {
      const next = Math.min(drawn + 50, end());
      body.append(...wanted.slice(drawn, next).map(row => typeof row === "function" ? row() : row));
      drawn = next;
    }
  };
  const turn = start => {
    first = drawn = start;
    body.replaceChildren();
    frame.scrollTop = 0;
    pager.hidden = wanted.length <= PAGE_ROWS;
    const [back, words, on] = pager.children;
    back.disabled = first === 0;
    on.disabled = end() === wanted.length;
    words.textContent = `rows ${(first + 1).toLocaleString("en")} to ${end().toLocaleString("en")} of ${wanted.length.toLocaleString("en")}`;
    fill();
  };
  pager.append(...["‹ previous", null, "next ›"].map(text => Object.assign(document.createElement(text ? "button" : "span"), { textContent: text || "" })));
  pager.firstChild.addEventListener("click", () => turn(first - PAGE_ROWS));
  pager.lastChild.addEventListener("click", () => turn(first + PAGE_ROWS));
  frame.addEventListener("scroll", fill);
  window.addEventListener("resize", fill);
  return (into, rows) => {
    if (body && body !== into) body.replaceChildren();
    body = into;
    wanted = rows;
    turn(0);
  };
};
// A click on a head sorts `rows` by value(row, column), up and then down; empty values stay last.
const sortable = (heads, rows, value, show) => heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
  const up = head.getAttribute("aria-sort") !== "ascending";
  heads.forEach(other => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const text = head.dataset.key === "text", empty = x => x === "" || x === null || x === undefined;
  rows.sort((a, b) => {
    const x = value(a, column), y = value(b, column);
    if (empty(x) || empty(y)) return empty(x) - empty(y);
    const order = text ? natural.compare(x, y) : Number(x) - Number(y);
    return up ? order : -order;
  });
  show();
}));
const dialog = document.getElementById("large");
const enlarge = (title, pictures) => {
  const bar = dialog.querySelector(".bar"), large = dialog.querySelector("img"), strong = document.createElement("strong");
  const link = viewerLink("#", "open in the viewer"), highest = viewerLink("#", "highest tile");
  strong.textContent = title;
  const buttons = pictures.map(([name, address, place, tile]) => {
    const button = document.createElement("button");
    button.textContent = name;
    button.addEventListener("click", () => {
      large.src = address;
      large.alt = name;
      link.href = (viewerAddress || "") + place;
      highest.href = tile ? (viewerAddress || "") + tile : "#";
      highest.hidden = !tile;
      buttons.forEach(other => other.setAttribute("aria-pressed", other === button));
    });
    return button;
  });
  bar.replaceChildren(strong, ...buttons, link, highest);
  buttons[0].click();
  dialog.showModal();
};
dialog.addEventListener("click", event => { if (event.target === dialog) dialog.close(); });
