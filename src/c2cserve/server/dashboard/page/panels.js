// The parts of the page but the requests: slices, models, links, queue.

import { bytes, element, meter, percent, seconds, table, tags } from "./format.js";

const COLOURS = { up: "good", ready: "good", starting: "warn", loading: "warn", draining: "warn", lost: "bad", failed: "bad" };

function coloured(text) {
  return element("span", { className: COLOURS[text] ?? "" }, text);
}

function left(text) {
  return element("th", { scope: "col", className: "left" }, text);
}

function row(name, ...value) {
  return [element("dt", {}, name), element("dd", {}, ...value)];
}

function named(name, models) {
  return [element("dt", {}, name), element("dd", { className: "wide" }, ...tags(models))];
}

function slice(one) {
  const rows = [
    ...row("computes", one.model || "nothing yet"),
    ...row("requests", `${one.running} running, ${one.waiting} waiting`),
    ...row("tokens", `${one.output_tokens_per_s.toFixed(1)}/s`),
    ...row("switches", String(one.switches)),
  ];
  if (one.resident_models?.length) rows.push(...named("keeps", one.resident_models));
  else rows.push(...row("keeps", one.resident_models ? "nothing" : bytes(one.weights_kept_bytes)));
  if (one.weights_lent_bytes) rows.push(...row("keeps at neighbours", bytes(one.weights_lent_bytes)));
  if (one.kv_host_bytes) rows.push(...row("KV on the host", bytes(one.kv_host_bytes)));
  rows.push(...row("loads", one.loading_models.join(", ") || (one.loaded_bytes_per_s ? "" : "nothing"),
    one.loaded_bytes_per_s ? ` ${bytes(one.loaded_bytes_per_s)}/s` : ""));
  const streams = one.link ? `${bytes(one.streamed_bytes_per_s)}/s` : "reads weights in place";
  rows.push(...row("streams", streams));
  if (one.peer_bytes_per_s) rows.push(...row("from neighbours", `${bytes(one.peer_bytes_per_s)}/s`));
  if (one.restarts) rows.push(...row("restarts", String(one.restarts)));
  if (one.active_models.length) rows.push(...named("active", one.active_models));
  return element("article", { className: "card" },
    element("header", {}, element("h3", {}, `${one.id} (${one.kind})`), coloured(one.state)),
    one.trouble ? element("p", { className: "bad" }, one.trouble) : null,
    meter("busy", one.busy_share, 1, percent(one.busy_share)),
    meter("KV", one.kv_used_bytes, one.kv_total_bytes, `${bytes(one.kv_used_bytes)} of ${bytes(one.kv_total_bytes)}`),
    element("dl", {}, ...rows));
}

function attainment(one) {
  if (!one.judged) return "–";
  const share = one.met / one.judged;
  const className = share >= 0.99 ? "good" : share >= 0.9 ? "warn" : "bad";
  return element("span", { className, title: `${one.met} of ${one.judged} in the last minute` }, percent(share));
}

function against(measured, target) {
  return `${seconds(measured)} / ${seconds(target)}`;
}

function model(one) {
  const where = element("td", { className: "left" });
  if (one.pool_bytes) where.append(element("span", { className: "tag" }, `pool ${bytes(one.pool_bytes)}`));
  else where.append(element("span", { className: "tag" }, "disk"));
  where.append(...tags((one.resident_slices ?? []).map((id) => `in ${id}`)));
  return [
    one.id + (one.pinned ? " (pinned)" : ""),
    element("td", { className: "left", title: one.error }, coloured(one.state)),
    bytes(one.weight_bytes), where,
    element("td", { className: "left" }, ...tags(one.active_slices)),
    String(one.running), String(one.waiting),
    against(one.ttft_p50_s, one.ttft_target_s), seconds(one.ttft_p95_s),
    against(one.tpot_p50_s, one.tpot_target_s), attainment(one),
  ];
}

function link(one) {
  const shown = `${bytes(one.used_bytes_per_s)}/s of ${bytes(one.bytes_per_s)}/s ${one.origin}`;
  return element("div", { className: "card" },
    meter(`${one.id}: ${one.slices.join(", ")}`, one.used_bytes_per_s, one.bytes_per_s, shown));
}

function queue(one) {
  const refused = Object.entries(one.refused).filter(([, count]) => count);
  const parts = [
    element("p", {}, `${one.running} running, ${one.waiting} waiting`,
      one.waiting ? `, the oldest for ${seconds(one.oldest_waiting_s)}` : "",
      one.tenants.length > 1 ? `; requests by tenant: ${one.tenants.join(", ")}` : ""),
    element("p", {}, refused.length ? "refused: " : "nothing was refused",
      ...refused.map(([why, count]) => element("span", { className: "tag warn" }, `${why} ${count}`))),
  ];
  return { parts, recent: one.recent };
}

export function show(part, state) {
  const slices = state.slices.map(slice);
  part("slices").replaceChildren(...(slices.length ? slices
    : [element("p", { className: "note" }, "No slice has been up yet.")]));
  part("pool").textContent = `pool ${bytes(state.pool_used_bytes)} of ${bytes(state.pool_budget_bytes)}`;
  part("models").replaceChildren(table(
    ["model", left("state"), "weights", left("where"), left("active on"), "running", "waiting",
      "TTFT p50 / target", "p95", "TPOT p50 / target", "SLO met"], state.models.map(model)));
  const links = state.links.map(link);
  part("links").replaceChildren(...(links.length ? links
    : [element("p", { className: "note" }, "No links: every slice reads its weights in place.")]));
  const { parts, recent } = queue(state.queue);
  if (recent.length) {
    parts.push(element("div", { className: "scroll" }, table(
      ["ago", left("model"), "status", left("why")],
      recent.map((one) => [seconds(Math.max(0, state.now_s - one.at_s)),
        element("td", { className: "left" }, one.model), String(one.status),
        element("td", { className: "left" }, one.reason)]))));
  }
  part("queue").replaceChildren(...parts);
}
