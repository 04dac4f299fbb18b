// The prefix tree: every box is a run of blocks, as wide as the requests that begin with it and all boxes above it.

const ROW = 28;
const MAX_ROWS = 24;
const NARROWEST = 3;
const USES = [1, 2, 4, 16, 64];

class Icicle {
  constructor(host, tree) {
    this.host = host; this.tree = tree;
    this.nodes = Icicle.nodes(tree);
    this.root = this.nodes[0];
    this.current = this.root;
    this.figure = make("div", { class: "icicle" });
    this.crumbs = make("nav", { class: "crumbs", "aria-label": "Where the tree is zoomed to" });
    this.output = make("output", { "aria-live": "polite" });
    const keys = make("p", { class: "keys" });
    for (const [key, does] of [["Enter", "zooms in"], ["Esc", "zooms out"], ["← → ↑ ↓", "move"]]) {
      keys.append(make("kbd", {}, key), ` ${does}  `);
    }
    const uses = make("div", { class: "legend" }, ...USES.map((least, step) => make("span", { class: "key" },
      draw("svg", { viewBox: "0 0 26 12", "aria-hidden": "true" }, draw("rect", { width: 26, height: 12, rx: 2, fill: `var(--n${step})`, stroke: "var(--line)" })),
      Icicle.useText(step))));
    host.replaceChildren(this.crumbs, this.figure, this.output, keys, uses);
    new ResizeObserver(() => this.render()).observe(this.figure);
    this.render();
    this.tell(this.root);
  }

  static nodes(tree) {
    const nodes = tree.parent.map((parent, at) => ({
      at, parent: null, children: [], label: tree.label[at], first: tree.first[at], blocks: tree.blocks[at],
      requests: tree.requests[at], request: tree.request[at], hidden: tree.hidden[at], hiddenRequests: tree.hidden_requests[at],
    }));
    nodes.forEach((node, at) => {
      if (tree.parent[at] < 0) return;
      node.parent = nodes[tree.parent[at]];
      node.parent.children.push(node);
    });
    for (const node of nodes) {
      node.children.sort((one, other) => other.requests - one.requests || one.at - other.at);
      if (node.hidden) {
        const rest = { at: -1, parent: node, children: [], requests: node.hiddenRequests, blocks: 0 };
        node.children.push({ ...rest, text: `${whole(node.hidden)} more`, isRest: true });
      }
    }
    return nodes;
  }

  static useText(step) {
    if (step === 0) return "1 request";
    return step + 1 < USES.length ? `${USES[step]}–${USES[step + 1] - 1}` : `${USES[step]} and more`;
  }

  static step(node) {
    return USES.filter((least) => node.requests >= least).length - 1;
  }

  name(node) {
    if (node === this.root) return "all requests";
    if (node.text) return node.text;
    return node.blocks ? `${node.blocks === 1 ? "block" : "blocks"} ${this.range(node)}` : node.label;
  }

  range(node) {
    const last = node.first + node.blocks - 1;
    return node.blocks === 1 ? whole(node.first) : `${whole(node.first)}–${whole(last)}`;
  }

  // What is written into a box: its name, its numbers alone, or as much of these as has room.
  written(node, width) {
    const name = this.name(node);
    return node.blocks && fitted(name, width) !== name ? fitted(this.range(node), width) : fitted(name, width);
  }

  describe(node) {
    const requests = `${whole(node.requests)} ${node.requests === 1 ? "request" : "requests"}`;
    if (node.isRest) return `${node.text}, left out of this page, with ${requests} in all`;
    if (node.isGroup) return `${node.text} with ${requests} in all; zoom in to see them`;
    const share = node.parent ? `, ${percent(node.requests / Math.max(node.parent.requests, 1))} of those above it` : "";
    const parts = [`${this.name(node)}: ${requests}${share}`];
    if (node.blocks) {
      const tokens = node.blocks * this.tree.block_size;
      parts.push(`${whole(tokens)} tokens, ${whole(tokens * (node.requests - 1))} of them found again by later requests`);
      parts.push(`first asked for by request ${whole(node.request)}`);
    }
    if (node.children.length) parts.push(`${whole(node.children.length)} below it`);
    return parts.join("; ");
  }

  render() {
    const width = Math.round(this.figure.clientWidth);
    if (!width) return;
    const focused = this.focused && this.figure.contains(document.activeElement) ? this.focused : null;
    this.boxes = new Map(); this.drawn = new Map();
    this.depth = 0; this.isCut = false;
    const svg = draw("svg", { role: "tree", "aria-label": "Prefix tree" });
    this.place(svg, this.current, 0, 0, width);
    const height = (this.depth + 1) * ROW;
    for (const [name, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, width, height })) svg.setAttribute(name, value);
    this.figure.replaceChildren(svg);
    this.focusable(this.boxes.has(focused) ? focused : this.current, focused !== null);
    this.showCrumbs();
  }

  place(svg, node, left, row, width) {
    this.depth = Math.max(this.depth, row);
    const box = draw("g", {
      role: "treeitem", tabindex: -1, "aria-level": row + 1, "aria-label": this.describe(node), "data-node": node.at,
    });
    if (node.children.length) box.setAttribute("aria-expanded", "true");
    const step = Icicle.step(node), isMany = node.isGroup || node.isRest;
    const fill = isMany ? "var(--grid)" : `var(--n${step})`, ink = isMany ? "var(--quiet)" : `var(--t${step})`;
    box.append(draw("rect", { x: left, y: row * ROW, width: Math.max(width, 1), height: ROW, fill }));
    const label = this.written(node, width - 12);
    if (label) box.append(draw("text", { x: left + 6, y: row * ROW + 18, fill: ink }, label));
    box.addEventListener("click", () => this.chosen(node));
    box.addEventListener("pointerenter", () => this.tell(node));
    box.addEventListener("focus", () => { this.focused = node; this.tell(node); });
    box.addEventListener("keydown", (event) => this.keyed(event, node));
    this.boxes.set(node, box);
    svg.append(box);
    if (row + 1 >= MAX_ROWS) { this.isCut ||= node.children.length > 0; return; }
    let from = left;
    const children = this.layout(node, width);
    this.drawn.set(node, children.map(([child]) => child));
    for (const [child, wide] of children) {
      this.place(svg, child, from, row + 1, wide);
      from += wide;
    }
  }

  // Children side by side, those too narrow to be seen as one box. Zoomed into, that shows its first ones and a box for
  // the others, and so on.
  layout(node, width) {
    if (node.isGroup && node !== this.current) return [];
    const own = node.isGroup ? node.children.slice(0, Math.max(Math.floor(width / 48), 4)) : node.children.filter(
      (child) => (width * child.requests) / Icicle.total(node) >= NARROWEST);
    const others = node.children.filter((child) => !own.includes(child));
    if (!others.length) return own.map((child) => [child, (width * child.requests) / Icicle.total(node)]);
    const group = others.length === 1 ? others[0] : Icicle.group(node, others);
    if (!node.isGroup) return [...own, group].map((child) => [child, (width * child.requests) / Icicle.total(node)]);
    const shown = sum(own.map((child) => child.requests));
    return [...own.map((child) => [child, (0.9 * width * child.requests) / shown]), [group, 0.1 * width]];
  }

  static total(node) {
    return Math.max(node.isGroup ? 1 : node.requests, sum(node.children.map((child) => child.requests)));
  }

  static group(node, children) {
    const requests = sum(children.map((child) => child.requests));
    return { at: -1, parent: node, children, requests, blocks: 0, text: `${whole(children.length)} narrow ones`, isGroup: true };
  }

  chosen(node) {
    if (node === this.current) this.zoom(node.parent || node);
    else if (!node.isRest) this.zoom(node);
  }

  zoom(node) {
    this.current = node;
    this.focused = node;
    this.render();
    this.focusable(node, true);
  }

  focusable(node, isFocused) {
    for (const [each, box] of this.boxes) box.setAttribute("tabindex", each === node ? 0 : -1);
    if (isFocused) this.boxes.get(node).focus();
    this.focused = node;
  }

  keyed(event, node) {
    const above = node === this.current ? null : [...this.drawn.keys()].find((each) => this.drawn.get(each).includes(node));
    const siblings = above ? this.drawn.get(above) : [node], at = siblings.indexOf(node);
    const to = {
      ArrowDown: (this.drawn.get(node) || [])[0], ArrowUp: above, ArrowRight: siblings[at + 1], ArrowLeft: siblings[at - 1],
      Home: this.current, End: siblings[siblings.length - 1],
    };
    if (event.key === "Enter" || event.key === " ") this.chosen(node);
    else if (event.key === "Escape" || event.key === "Backspace") this.zoom(this.current.parent || this.current);
    else if (event.key in to) { if (to[event.key]) this.focusable(to[event.key], true); }
    else return;
    event.preventDefault();
  }

  tell(node) {
    this.output.textContent = this.describe(node) + (this.isCut ? "; deeper levels show when zoomed in" : "");
  }

  showCrumbs() {
    const path = [];
    for (let node = this.current; node; node = node.parent) path.unshift(node);
    const list = make("ol");
    for (const node of path) {
      const button = make("button", { type: "button" }, this.name(node));
      if (node === this.current) button.setAttribute("aria-current", "true");
      button.addEventListener("click", () => this.zoom(node));
      list.append(make("li", {}, button));
    }
    this.crumbs.replaceChildren(list);
  }
}
