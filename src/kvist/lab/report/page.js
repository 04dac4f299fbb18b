// Puts the pictures where the page has places for them. Text from traces gets into the page as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const place = (name) => document.querySelector(`[data-picture="${name}"]`);

function hitRate(host) {
  const tokens = (blocks) => (data.block_size ? `${whole(blocks)} blocks, ${short(blocks * data.block_size)} tokens` : `${whole(blocks)} blocks`);
  const series = [...data.curves, ...data.points.map((each) => ({ ...each, isPoints: true }))];
  new Chart(host, series, {
    name: "Hit rate over cache size", isLog: true, xLabel: "blocks in the cache", xText: short, xRead: tokens, yText: tickPercent, yRead: percent,
  });
}

function overTime(host) {
  const series = data.results.filter((each) => each.time.length).map((each) => ({ name: each.name, x: each.time, y: each.hit_rate }));
  const times = timesUpTo(Math.max(...series.flatMap((each) => each.x)));
  new Chart(host, series, { name: "Hit rate over time", ...times, yText: tickPercent, yRead: percent });
}

function occupancy(host) {
  const results = data.results.filter((each) => each.time.length);
  const choice = make("select", { id: "occupancy-of" }, ...results.map((each, at) => make("option", { value: at }, each.name)));
  const tiers = make("div", { class: "figure" }), namespaces = make("div", { class: "figure" });
  const show = () => {
    const result = results[Number(choice.value)];
    stacked(tiers, result, result.tiers, "Blocks by tier");
    stacked(namespaces, result, result.namespaces, "Blocks by namespace");
  };
  choice.addEventListener("change", show);
  const label = make("label", { for: "occupancy-of" }, "Replay");
  const pair = make("div", { class: "pair" });
  for (const [title, chart] of [["By tier", tiers], ["By namespace", namespaces]]) pair.append(make("div", {}, make("h3", {}, title), chart));
  host.replaceChildren(make("div", { class: "choose" }, label, choice), pair);
  show();
}

function stacked(host, result, parts, name) {
  const series = parts.map((part) => ({ name: part.name, x: result.time, y: part.y }));
  if (!series.length) host.replaceChildren(make("p", { class: "quiet" }, "Nothing was counted."));
  else {
    const yRead = (value) => `${whole(value)} blocks`;
    new Chart(host, series, { name, isStacked: true, ...timesUpTo(Math.max(...result.time)), yText: short, yRead });
  }
}

function misses(host) {
  const rows = data.results.filter((each) => sum(each.misses)).map((each) => ({ name: each.name, parts: each.misses }));
  new Bars(host, rows, data.miss_classes, { name: "Tokens missed, by reason", text: (value) => `${whole(value)} tokens` });
}

function reuse(host) {
  const columns = data.reuse.map((each) => ({
    name: each.name, value: each.share, colour: each.is_first ? 1 : 0, text: `${each.text}: ${whole(each.count)} references, ${percent(each.share)}`,
  }));
  new Columns(host, columns, { name: "Reuse distance", xLabel: "blocks touched since the last use, up to", yText: tickPercent });
}

function theme() {
  const buttons = [...document.querySelectorAll("[data-theme-choice]")];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      const chosen = button.dataset.themeChoice;
      if (chosen === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = chosen;
      for (const each of buttons) each.setAttribute("aria-pressed", String(each === button));
    });
  }
}

document.documentElement.classList.add("scripted");
for (const details of document.querySelectorAll("details")) details.open = false;
theme();
for (const [name, show] of Object.entries({ "hit-rate": hitRate, time: overTime, occupancy, misses, reuse })) {
  if (place(name)) show(place(name));
}
if (place("icicle")) new Icicle(place("icicle"), data.icicle);
document.documentElement.dataset.ready = "true";
