// Shows an OpenAPI document: its operations by the API that they belong to.

const GROUPS = [
  ["OpenAI", /^\/v1\/(chat|completions|models|responses)/],
  ["Anthropic", /^\/v1\/messages/],
  ["Ollama", /^\/(api\/|$)/],
  ["Tokens", /^\/(de)?tokenize/],
  ["Administration", /^\/admin/],
  ["Observation", /./],
];

function element(tag, fields = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(fields)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

class Schemas {
  constructor(spec) {
    this.named = spec.components?.schemas ?? {};
  }

  resolve(schema) {
    const name = schema?.$ref?.split("/").pop();
    return name ? { title: name, ...this.named[name] } : (schema ?? {});
  }

  // One line that says what values a schema takes.
  kind(schema, depth = 0) {
    const one = this.resolve(schema);
    if (schema?.$ref && depth) return one.title;
    if (one.const !== undefined) return JSON.stringify(one.const);
    if (one.enum) return one.enum.map((value) => JSON.stringify(value)).join(" | ");
    const several = one.anyOf ?? one.oneOf;
    if (several) return [...new Set(several.map((part) => this.kind(part, depth + 1)))].join(" | ");
    if (one.type === "array") return `[${this.kind(one.items, depth + 1)}]`;
    return [one.type ?? "any"].flat().join(" | ");
  }

  bounds(schema) {
    const parts = [schema, ...(schema.anyOf ?? [])].map((part) => this.resolve(part));
    const of = (name) => parts.find((part) => part[name] !== undefined)?.[name];
    const shown = [
      ["at least ", of("minimum")], ["above ", of("exclusiveMinimum")], ["at most ", of("maximum")],
      ["items: at least ", of("minItems")], ["items: at most ", of("maxItems")],
      ["characters: at most ", of("maxLength")], ["default ", of("default") ?? undefined],
    ].filter(([, value]) => value !== undefined);
    return shown.map(([word, value]) => word + JSON.stringify(value)).join(", ");
  }

  table(schema) {
    const one = this.resolve(schema);
    const alternatives = one.oneOf ?? one.anyOf;
    if (alternatives && !one.properties) {
      const kinds = alternatives.map((part) => this.resolve(part)).filter((part) => part.properties);
      if (kinds.length) return element("div", {}, ...kinds.map((part) => this.section(part)));
    }
    if (!one.properties) return element("p", {}, element("code", {}, this.kind(schema, 1)));
    const rows = Object.entries(one.properties).map(([name, field]) => element("tr", {},
      element("td", {}, element("code", {}, name), one.required?.includes(name) ? " *" : ""),
      element("td", {}, element("code", {}, this.kind(field, 1))),
      element("td", {}, [this.bounds(field), field.description].filter(Boolean).join(". ")),
    ));
    const head = ["field (* required)", "values", ""].map((text) => element("th", {}, text));
    return element("div", { class: "scroll" }, element("table", {}, element("tr", {}, ...head), ...rows));
  }

  section(schema) {
    return element("details", {}, element("summary", {}, schema.title ?? "object"), this.table(schema));
  }
}

function content(schemas, media) {
  return Object.entries(media ?? {}).flatMap(([kind, { schema, example, examples }]) => {
    const shown = example ?? Object.values(examples ?? {})[0]?.value;
    const parts = [element("p", { class: "soft" }, kind), schema ? schemas.table(schema) : ""];
    if (shown !== undefined) parts.push(element("pre", { tabindex: "0" }, JSON.stringify(shown, null, 2)));
    return parts;
  });
}

function operation(schemas, method, path, described) {
  const body = [];
  if (described.description) body.push(element("p", {}, described.description));
  for (const one of described.parameters ?? []) {
    body.push(element("p", {}, element("code", {}, one.name), ` (${one.in})`));
  }
  if (described.requestBody) {
    body.push(element("h3", {}, "Request"), ...content(schemas, described.requestBody.content));
  }
  for (const [status, answer] of Object.entries(described.responses)) {
    const inner = content(schemas, answer.content);
    const title = `${status} ${answer.description}`;
    body.push(element("details", {}, element("summary", {}, title), ...inner));
  }
  const summary = element("summary", {},
    element("span", { class: "method" }, method.toUpperCase()), element("code", {}, path),
    element("span", { class: "soft" }, ` ${described.summary ?? ""}`),
  );
  const made = element("details", { id: `${method}${path}` }, summary, ...body);
  made.dataset.text = `${method} ${path} ${described.summary}`.toLowerCase();
  return made;
}

function show(spec) {
  const schemas = new Schemas(spec);
  const groups = new Map(GROUPS.map(([name]) => [name, []]));
  for (const [path, methods] of Object.entries(spec.paths)) {
    const [name] = GROUPS.find(([, begins]) => begins.test(path));
    for (const [method, described] of Object.entries(methods)) {
      groups.get(name).push(operation(schemas, method, path, described));
    }
  }
  document.getElementById("version").textContent = spec.info.version;
  document.getElementById("operations").replaceChildren(...[...groups].map(([name, operations]) =>
    element("section", { "aria-label": name }, element("h2", {}, name), ...operations)));
  document.getElementById(decodeURIComponent(location.hash.slice(1)))?.setAttribute("open", "");
}

const find = document.getElementById("find");
find.addEventListener("input", () => {
  const wanted = find.value.trim().toLowerCase();
  for (const section of document.querySelectorAll("section")) {
    const shown = [...section.querySelectorAll(":scope > details")].filter((one) => {
      one.hidden = !one.dataset.text.includes(wanted);
      return !one.hidden;
    });
    section.hidden = !shown.length;
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && event.target !== find) {
    event.preventDefault();
    find.focus();
  }
});

fetch("/openapi.json")
  .then((answer) => answer.ok ? answer.json() : Promise.reject(new Error(`status ${answer.status}`)))
  .then(show)
  .catch((error) => {
    document.getElementById("operations").textContent = `The description cannot be read: ${error.message}`;
  });
