// Figures and elements. Text from the server becomes text nodes only, never markup.

const STEPS = ["B", "kB", "MB", "GB", "TB"];

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  let step = 0;
  while (value >= 1000 && step < STEPS.length - 1) {
    value /= 1000;
    step += 1;
  }
  return `${step && value < 100 ? value.toFixed(1) : Math.round(value)} ${STEPS[step]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 2 : 0)} ms`;
  return value < 100 ? `${value.toFixed(1)} s` : `${Math.round(value)} s`;
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${Math.round(value * 100)} %`;
}

export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in made && key !== "list") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children.filter((one) => one !== null && one !== undefined));
  return made;
}

export function meter(label, value, of, shown) {
  const bar = element("meter", { min: 0, max: 1, value: of > 0 ? Math.min(1, value / of) : 0 });
  bar.setAttribute("aria-label", label);
  return element("div", { className: "meter" }, element("span", {}, label), element("span", {}, shown), bar);
}

export function table(heads, rows) {
  const head = element("tr", {}, ...heads.map((one) =>
    one instanceof Node ? one : element("th", { scope: "col" }, one)));
  const body = rows.map((cells) => element("tr", {}, ...cells.map((one) =>
    one instanceof Node && one.nodeName === "TD" ? one : element("td", {}, one))));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
}

export function tags(names, className = "tag") {
  return names.map((one) => element("span", { className }, one));
}
