const natural = new Intl.Collator(undefined, { numeric: true });
// Rows are drawn as they come into sight, fifty at a time; `more` lies below those that are there.
const lazily = (frame, body, more) => {
  let wanted = [], drawn = 0;
  const fill = () => {
    while (drawn < wanted.length && more.getBoundingClientRect().top < frame.getBoundingClientRect().bottom + 400) {
      body.append(...wanted.slice(drawn, drawn + 50).map(row => typeof row === "function" ? row() : row));
      drawn = Math.min(drawn + 50, wanted.length);
    }
  };
  frame.addEventListener("scroll", fill);
  window.addEventListener("resize", fill);
  return rows => { wanted = rows; drawn = 0; body.replaceChildren(); fill(); };
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
  strong.textContent = title;
  const buttons = pictures.map(([name, address]) => {
    const button = document.createElement("button");
    button.textContent = name;
    button.addEventListener("click", () => {
      large.src = address;
      large.alt = name;
      buttons.forEach(other => other.setAttribute("aria-pressed", other === button));
    });
    return button;
  });
  bar.replaceChildren(strong, ...buttons);
  buttons[0].click();
  dialog.showModal();
};
dialog.addEventListener("click", event => { if (event.target === dialog) dialog.close(); });
