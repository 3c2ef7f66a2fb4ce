"use strict";
// The player: a picture is a function of (scene, progress); everything else only moves these two numbers.

const trace = JSON.parse(document.getElementById("trace").textContent);
const find = (id) => document.getElementById(id);
const ROOT = -1, BETWEEN = -2, NO_BUCKET = -1;
const SECONDS = {scatter: 2.5, gather: 2.5, forward: 2.5, loss: 1.2, backward: 3, update: 1.5, round: 1.8, step: 1.5};
const MOST_CELLS = 64, LABELS = 84;
const calm = matchMedia("(prefers-reduced-motion: reduce)");

let step, scene = 0, progress = 0, passed = 0, playing = false, before = 0, layout, moving = [];

// Numbers as people read them.
function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  while (count >= 1024 && unit < 3) { count /= 1024; unit++; }
  return `${unit ? Number(count.toPrecision(4)) : count} ${units[unit]}`;
}
function time(us) {
  if (us >= 1e6) return `${(us / 1e6).toPrecision(3)}\u00a0s`;
  return us >= 1000 ? `${(us / 1000).toPrecision(3)}\u00a0ms` : `${us < 10 ? us.toFixed(1) : us.toFixed(0)}\u00a0µs`;
}
const many = (count, noun, ending = "s") => `${count} ${noun}${count === 1 ? "" : ending}`;
const colour = (rank) => rank < 0 ? "var(--accent)" : `hsl(${(rank * 137 + 212) % 360} 62% var(--light))`;

// SVG.
function draw(parent, kind, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}
function box(parent, x, y, width, height, fill, tip) {
  const made = draw(parent, "rect", {x, y, width: Math.max(0, width), height, rx: Math.min(3, height / 4), style: `fill: ${fill}`});
  if (tip) explain(made, tip);
  return made;
}
function explain(element, tip) {
  element.dataset.tip = tip;
  draw(element, "title", {}, tip);
}

// Where things stand: the root above, the ranks below in as many columns as there is room for.
function arrange(width) {
  const ranks = Math.max(1, step.devices.length);
  const most = Math.max(1, Math.floor(width / 112));
  const rows = Math.ceil(ranks / most), columns = Math.ceil(ranks / rows);
  const gap = 10, wide = Math.min(240, (width - gap * (columns - 1)) / columns);
  const left = (width - columns * wide - gap * (columns - 1)) / 2;
  const hasRoot = step.scenes.some((each) => each.kind !== "round" || ends(each).some((rank) => rank < 0));
  const root = {x: Math.max(0, width / 2 - 190), y: 4, width: Math.min(width, 380), height: 74};
  const top = hasRoot ? 138 : 4, tall = step.buckets.length || hasRoot ? 180 : 112;
  const cards = Array.from({length: ranks}, (_, rank) => ({
    x: left + (rank % columns) * (wide + gap), y: top + Math.floor(rank / columns) * (tall + 18), width: wide, height: tall,
  }));
  return {root, hasRoot, cards, tall, width, height: top + rows * (tall + 18)};
}
const ends = (now) => now.arrows.flatMap((arrow) => [...arrow.from, ...arrow.to]);
const cardOf = (rank) => rank >= 0 && rank < layout.cards.length ? layout.cards[rank] : layout.root;
// The bars of a card, one below the other, with their names on the left where there is room.
function inside(rank) {
  const card = cardOf(rank), room = card !== layout.root && card.width >= 200 ? LABELS : 0;
  return {x: card.x + 8 + room, width: card.width - 16 - room, named: room > 0};
}
function barOf(rank) {
  const card = cardOf(rank), isRoot = card === layout.root;
  return {...inside(rank), y: card.y + (isRoot ? 44 : layout.tall - 64), height: 18};
}
function ticksOf(rank) {
  const card = cardOf(rank), isRoot = card === layout.root;
  return {...inside(rank), y: card.y + (isRoot ? 30 : 44), height: isRoot ? 34 : 24};
}
function nameBar(parent, rank, bar, name) {
  if (bar.named) label(parent, cardOf(rank).x + 8, bar.y + bar.height / 2 + 5, name, LABELS - 6, "soft");
}

// What has happened before a scene: the picture is drawn from it.
function stateBefore(index) {
  const state = {rows: null, atRanks: false, replicas: false, ready: new Set(), summed: new Set(), updated: false};
  step.scenes.forEach((each, at) => {
    if (each.kind === "scatter" && !state.rows) state.rows = each;
    if (at >= index) return;
    if (each.kind === "scatter") state.atRanks = true;
    if (each.kind === "round" && each.operation === "broadcast") state.replicas = true;
    if (each.kind === "backward") each.ready.forEach((mark) => state.ready.add(`${mark.rank} ${mark.bucket}`));
    if (each.kind === "round" && each.operation === "reduce" && each.bucket !== NO_BUCKET) state.summed.add(each.bucket);
    if (each.kind === "update") state.updated = true;
  });
  if (step.name === "train_step" || step.name === "evaluate") state.replicas = true;
  return state;
}

// One cell for so many rows, the same number in the batch and on the ranks.
const rowsPerCell = (counts) => Math.ceil(counts.reduce((sum, count) => sum + count, 0) / MOST_CELLS) || 1;
function drawTicks(parent, at, count, per, fillOf, tip) {
  const shown = Math.ceil(count / per), each = at.width / Math.max(shown, 1);
  for (let cell = 0; cell < shown; cell++)
    box(parent, at.x + cell * each + 0.5, at.y, Math.max(1, each - 1.5), at.height, fillOf(cell * per), tip);
}
function ownerOf(counts, row) {
  let rank = 0;
  while (rank < counts.length - 1 && row >= counts[rank]) row -= counts[rank++];
  return rank;
}

function drawRoot(parent, now, state) {
  if (!layout.hasRoot) return;
  const {root} = layout, rows = now.kind === "gather" || now.kind === "scatter" ? now : state.rows;
  const isTensor = now.kind === "round" && ends(now).some((rank) => rank < 0);
  draw(parent, "rect", {class: "card", rx: 6, ...root});
  if (isTensor) {
    const names = {broadcast: "the root's parameters", reduce: "the sums"};
    label(parent, root.x + 8, root.y + 20, names[now.operation] || "nobody's memory, on the way", root.width - 16);
    const bar = barOf(ROOT);
    box(parent, bar.x, bar.y, bar.width, bar.height, now.operation === "broadcast" ? "var(--accent)" : "var(--idle)", bytes(Math.max(0, ...now.nbytes)));
  } else if (rows) {
    const total = rows.counts.reduce((sum, count) => sum + count, 0), tensor = rows.tensors[0];
    const done = rows.kind === "gather" && progress >= 1;
    label(parent, root.x + 8, root.y + 20, `${rows.what}: ${many(total, "row")} on ${tensor.source}`, root.width - 16);
    const fill = (row) => rows.kind === "gather" && !done ? "var(--idle)" : colour(ownerOf(rows.counts, row));
    drawTicks(parent, ticksOf(ROOT), total, rowsPerCell(rows.counts), fill, tipOf(rows, -1));
  } else {
    label(parent, root.x + 8, root.y + 20, "the caller", root.width - 16);
  }
}
function tipOf(cut, rank) {
  return cut.tensors.map((tensor) => {
    const shape = rank < 0 ? tensor.shapes.map((each) => `(${each.join(", ")})`).join(" ") : `(${tensor.shapes[rank].join(", ")})`;
    const size = rank < 0 ? tensor.nbytes.reduce((sum, each) => sum + each, 0) : tensor.nbytes[rank];
    return `${tensor.name} ${tensor.dtype} ${shape}, ${bytes(size)}, ${tensor.route}`;
  }).join("; ");
}
function label(parent, x, y, text, width, kind = "") {
  const element = draw(parent, "text", {x, y, class: kind}, text);
  if (element.getComputedTextLength && element.getComputedTextLength() > width) {
    draw(element, "title", {}, text);
    let shown = text;
    while (shown.length > 3 && element.getComputedTextLength() > width) {
      shown = shown.slice(0, -1);
      element.firstChild.data = `${shown}…`;
    }
  }
}

function drawRank(parent, rank, now, state) {
  const card = cardOf(rank), span = (now.ranks || []).find((each) => each.rank === rank);
  const group = draw(parent, "g", {"data-rank": rank});
  draw(group, "rect", {class: span ? "card busy" : "card", rx: 6, ...card});
  label(group, card.x + 8, card.y + 20, `rank ${rank}`, card.width - 16);
  label(group, card.x + 8, card.y + 36, step.devices[rank] || "", card.width - 16, "soft");
  const ticks = ticksOf(rank), rows = state.rows;
  if (rows && rank < rows.counts.length) {
    const isHere = state.atRanks || (now.kind === "scatter" && progress >= 1);
    nameBar(group, rank, ticks, "rows");
    drawTicks(group, ticks, rows.counts[rank], rowsPerCell(rows.counts), () => isHere ? colour(rank) : "var(--idle)", tipOf(rows, rank));
  }
  drawLayers(group, rank, card, now, state);
  drawBuckets(group, rank, now, state);
  doing(rank, now, span).forEach((text, line) => label(group, card.x + 8, card.y + layout.tall - 26 + 17 * line, text, card.width - 16, "soft"));
}
function doing(rank, now, span) {
  if (span) return [`${now.kind} ${time(span.end - span.begin)}`];
  if (now.kind === "scatter" || now.kind === "gather") return rank < now.counts.length ? [many(now.counts[rank], "row")] : now.counts.length > 1 ? ["no rows"] : [];
  if (now.kind !== "round") return [];
  const ways = now.arrows.flatMap((arrow) => waysOf(arrow).map(([from, to]) => ({from, to, nbytes: arrow.nbytes})));
  const got = ways.filter((way) => way.to === rank).reduce((sum, way) => sum + way.nbytes, 0);
  const gave = ways.filter((way) => way.from === rank).reduce((sum, way) => sum + way.nbytes, 0);
  return [gave ? `gives ${bytes(gave)}` : "", got ? `gets ${bytes(got)}` : ""].filter(Boolean);
}
// From where to where an arrow's bytes go: from its sources to its first target, from there to the others; what a rank
// has already goes nowhere, as in the table.
function waysOf(arrow) {
  const home = arrow.to[0], isAway = (rank) => rank !== home;
  return [...arrow.from.filter(isAway).map((rank) => [rank, home]), ...arrow.to.filter(isAway).map((rank) => [home, rank])];
}
// The layers of a replica, in the order of the forward: buckets go from the last layer to the first.
function layersOf() {
  return step.buckets.flatMap((each) => each.names.map((name, i) => ({name, nbytes: each.nbytes[i], bucket: each.bucket}))).reverse();
}
function drawLayers(parent, rank, card, now, state) {
  const layers = layersOf(), total = layers.reduce((sum, each) => sum + Math.sqrt(each.nbytes), 0);
  const bar = {...inside(rank), y: card.y + 78, height: 26}, width = bar.width;
  if (layers.length) nameBar(parent, rank, bar, "parameters");
  let x = bar.x;
  layers.forEach((layer) => {
    const wide = width * Math.sqrt(layer.nbytes) / total, end = (x + wide - bar.x) / width;
    const isLit = now.kind === "forward" ? end <= progress : now.kind === "backward" ? end >= 1 - progress : false;
    const fill = !state.replicas && rank > 0 ? "var(--idle)" : isLit ? colour(rank) : "color-mix(in srgb, var(--accent) 35%, var(--box))";
    box(parent, x, bar.y, Math.max(0.8, wide - 1), bar.height, fill, `${layer.name}, ${bytes(layer.nbytes)}, bucket ${layer.bucket}`);
    x += wide;
  });
}
function readyNow(rank, bucket, now, state) {
  if (state.ready.has(`${rank} ${bucket}`)) return true;
  if (now.kind !== "backward") return state.summed.has(bucket);
  const at = now.begin + progress * (now.end - now.begin);
  const mark = now.ready.find((each) => each.rank === rank && each.bucket === bucket);
  return mark ? mark.at <= at : progress >= 1;
}
function drawBuckets(parent, rank, now, state) {
  const bar = barOf(rank);
  if (now.kind === "round" && now.bucket === NO_BUCKET) {
    drawChunks(parent, rank, now, bar);
    return;
  }
  const sizes = step.buckets.map((each) => each.nbytes.reduce((sum, size) => sum + size, 0));
  const total = sizes.reduce((sum, size) => sum + Math.sqrt(size), 0);
  if (sizes.length) nameBar(parent, rank, bar, "gradients");
  let x = bar.x;
  step.buckets.forEach((each, i) => {
    const wide = bar.width * Math.sqrt(sizes[i]) / total;
    const fill = state.updated ? "var(--idle)" : readyNow(rank, each.bucket, now, state) ? colour(rank) : "var(--idle)";
    box(parent, x, bar.y, Math.max(0.8, wide - 1.5), bar.height, fill, `gradients of bucket ${each.bucket}: ${bytes(sizes[i])}${state.summed.has(each.bucket) ? ", summed" : ""}`);
    x += wide;
  });
}

// Of a tensor that goes round chunk by chunk: whose values each chunk of each rank has in it before this round.
function contributions() {
  let first = scene;
  while (step.scenes[first].round > 0 && first > 0) first--;
  const rounds = step.scenes.slice(first).filter((each, index, all) => all.slice(0, index + 1).every((one, i) => one.kind === "round" && (i === 0 || one.round > 0)));
  const offsets = [...new Set(rounds.flatMap((each) => each.arrows.map((arrow) => arrow.offset)))].sort((one, other) => one - other);
  // An all-gather fills empty memory from the parts; all others begin with what each rank has.
  const fills = rounds[0].operation === "all_gather";
  const held = step.devices.map((_, rank) => new Map(offsets.map((offset) => [offset, fills ? [] : [rank]])));
  const union = fills ? (ranks) => ranks : (ranks, offset) => [...new Set(ranks.flatMap((rank) => rank >= 0 ? held[rank].get(offset) : []))].sort((one, other) => one - other);
  for (const each of rounds.slice(0, scene - first + (progress >= 1 ? 1 : 0))) {
    const made = each.arrows.map((arrow) => [arrow, union(arrow.from, arrow.offset)]);
    for (const [arrow, ranks] of made) for (const rank of arrow.to) if (rank >= 0) held[rank].set(arrow.offset, ranks);
  }
  return {held, offsets};
}
function drawChunks(parent, rank, now, bar) {
  const {held, offsets} = contributions(), whole = now.arrows.length ? now.arrows[0].whole : 0;
  offsets.forEach((offset, index) => {
    const end = index + 1 < offsets.length ? offsets[index + 1] : whole, scale = whole ? bar.width / whole : 0;
    const x = bar.x + offset * scale, wide = scale ? (end - offset) * scale - 2 : bar.width, of = held[rank].get(offset);
    of.forEach((each, i) => box(parent, x, bar.y + i * bar.height / of.length, wide, bar.height / of.length, colour(each),
      `chunk ${index} of rank ${rank}, ${bytes(end - offset)}: ${of.length > 1 ? `the sum of ranks ${of.join(", ")}` : `rank ${of[0]}'s own`}`));
  });
}

// What moves: each token has a way from one point to another, in a part of the scene's time.
function token(parent, from, to, size, fill, tip, begin = 0, end = 1) {
  const made = box(parent, 0, 0, size[0], size[1], fill, tip);
  made.style.stroke = "var(--box)";
  moving.push({element: made, from, to, begin, end});
}
function rowTokens(parent, now) {
  const toRanks = now.kind === "scatter", total = now.counts.reduce((sum, count) => sum + count, 0);
  const shown = Math.min(total, 64), root = ticksOf(ROOT), size = [Math.max(3, Math.min(10, root.width / shown - 1.5)), 22];
  for (let tick = 0; tick < shown; tick++) {
    const row = Math.floor(tick * total / shown), rank = ownerOf(now.counts, row);
    const first = now.counts.slice(0, rank).reduce((sum, count) => sum + count, 0), ticks = ticksOf(rank);
    const home = {x: root.x + root.width * row / total, y: root.y};
    const away = {x: ticks.x + (ticks.width - size[0]) * (row - first) / Math.max(1, now.counts[rank]), y: ticks.y};
    token(parent, toRanks ? home : away, toRanks ? away : home, size, colour(rank), tipOf(now, rank), 0.4 * tick / shown, 0.6 + 0.4 * tick / shown);
  }
}
function chunkAt(rank, arrow) {
  const bar = barOf(rank);
  return {x: bar.x + (arrow.whole ? bar.width * arrow.offset / arrow.whole : 0), y: bar.y + 4};
}
function chunkSize(arrow) {
  const width = Math.min(barOf(0).width, barOf(ROOT).width);
  return [Math.max(5, arrow.whole ? width * Math.min(1, arrow.nbytes / arrow.whole) - 2 : width), 10];
}
function arrowTokens(parent, arrow) {
  const home = arrow.to[0], away = arrow.to.slice(1), half = arrow.sums && away.length ? 0.5 : 1;
  const tip = `${arrow.sums ? "sum" : "copy"}: ${bytes(arrow.nbytes)} in ${many(arrow.hops, "operation")}`;
  for (const rank of arrow.from)
    if (rank !== home) token(parent, chunkAt(rank, arrow), chunkAt(home, arrow), chunkSize(arrow), colour(rank), `${nameOf(rank)} to ${nameOf(home)}: ${tip}`, 0, half);
  for (const rank of away)
    token(parent, chunkAt(home, arrow), chunkAt(rank, arrow), chunkSize(arrow), arrow.sums ? "var(--mark)" : colour(arrow.from[0]), `${nameOf(home)} to ${nameOf(rank)}: ${tip}`, arrow.sums ? half : 0, 1);
}
const nameOf = (rank) => rank >= 0 ? `rank ${rank}` : rank === BETWEEN ? "nobody's memory" : "the root";

let picture;
function drawScene() {
  const now = step.scenes[scene], holder = find("picture");
  layout = arrange(holder.clientWidth || 320);
  holder.replaceChildren();
  picture = draw(holder, "svg", {viewBox: `0 0 ${layout.width} ${layout.height}`, height: layout.height, role: "img", "aria-label": `${now.title}. ${now.text}`});
  drawStill();
}
function drawStill() {
  const now = step.scenes[scene], state = stateBefore(scene);
  picture.replaceChildren();
  moving = [];
  picture.dataset.scene = scene;
  drawRoot(picture, now, state);
  for (let rank = 0; rank < step.devices.length; rank++) drawRank(picture, rank, now, state);
  const tokens = draw(picture, "g", {class: "tokens"});
  if (now.kind === "scatter" || now.kind === "gather") rowTokens(tokens, now);
  if (now.kind === "round") now.arrows.forEach((arrow) => arrowTokens(tokens, arrow));
}
function move() {
  for (const {element, from, to, begin, end} of moving) {
    const way = Math.max(0, Math.min(1, (progress - begin) / (end - begin))), eased = way * way * (3 - 2 * way);
    element.setAttribute("transform", `translate(${from.x + (to.x - from.x) * eased} ${from.y + (to.y - from.y) * eased})`);
    element.style.opacity = way === 0 ? 0 : 1;  // until it leaves, its bar shows it
  }
}

// The timeline.
function drawTimeline() {
  const holder = find("timeline"), width = holder.clientWidth || 320, left = width < 600 ? 84 : 150, row = 30;
  const height = step.lanes.length * row + 24, scale = (width - left - 4) / Math.max(step.us, 0.001);
  holder.replaceChildren();
  const svg = draw(holder, "svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `Timeline of ${time(step.us)}: ${step.lanes.map((lane) => `${lane.name}, ${many(lane.bars.length, "bar")}`).join("; ")}`});
  const staged = step.pipelines.length > 0;
  find("turns").hidden = !step.lanes.some((lane) => lane.bars.some((bar) => bar.turns));
  if (staged) hatch(svg);
  step.lanes.forEach((lane, index) => {
    const y = index * row;
    draw(svg, "rect", {class: staged && lane.name.startsWith("stage") ? "hatch" : "lane", x: left, y: y + 2, width: width - left, height: row - 4});
    label(svg, 0, y + 20, width < 600 ? lane.name.split(" (")[0] : lane.name, left - 8);
    const rank = /^(?:rank|stage) (\d+)/.exec(lane.name);
    lane.bars.forEach((bar) => {
      const about = `${bar.name}${bar.bucket >= 0 ? `, ${staged ? "micro-batch" : "bucket"} ${bar.bucket}` : ""}: ${time(bar.end - bar.begin)}, from ${time(bar.begin)}${bar.turns ? ", in turns with other ranks, in one thread" : ""}`;
      const x = left + bar.begin * scale, wide = Math.max(1.5, (bar.end - bar.begin) * scale);
      if (staged && rank) {
        block(svg, x, y + 4, wide, row - 8, bar.name, bar.bucket, about);
        return;
      }
      const fade = {forward: 100, loss: 55, backward: 75}[bar.name] || 70, base = rank ? colour(Number(rank[1])) : "var(--accent)";
      const made = box(svg, x, y + 4, wide, row - 8, `color-mix(in srgb, ${base} ${fade}%, var(--box))`, about);
      made.classList.toggle("turns", Boolean(bar.turns));
      if (staged) return;
      made.classList.add("hit");
      made.addEventListener("click", () => go(sceneNear(bar)));
    });
  });
  label(svg, left, height - 6, "0", 40, "soft");
  draw(svg, "text", {x: width - 2, y: height - 6, class: "soft", "text-anchor": "end"}, time(step.us));
  draw(svg, "line", {class: "now", id: "now", y1: 0, y2: height - 22, visibility: staged ? "hidden" : "visible"});
  holder.dataset.left = left;
  holder.dataset.scale = scale;
}
// A numbered block of a micro-batch: light forward, dark backward.
function block(svg, x, y, width, height, kind, batch, about) {
  const hue = `hsl(${(batch * 67 + 212) % 360} 55% 45%)`;
  box(svg, x, y, width, height, `color-mix(in srgb, ${hue} ${kind === "forward" ? "80%, white" : "65%, black"})`, about);
  if (width > 16) draw(svg, "text", {class: "block", x: x + width / 2, y: y + height / 2 + 5}, batch);
}
// Pipelines: below the timeline, the slots of the schedule.
function drawPipelines() {
  find("pipeline-part").hidden = !step.pipelines.length;
  for (const each of document.querySelectorAll(".stage, #scenes-part, #keys, #click")) each.hidden = step.pipelines.length > 0 || step.inference !== null || step.name === "place";
  const holder = find("pipeline");
  holder.replaceChildren();
  step.pipelines.forEach((run) => {
    for (const line of run.about) holder.append(paragraph(line));
    const width = holder.clientWidth || 320, left = width < 600 ? 84 : 150, row = 26, height = run.stages.length * row + 24;
    const svg = draw(holder, "svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `the schedule: ${many(run.ideal.length, "block")} in ${many(run.slots, "slot")}`});
    hatch(svg);
    const scale = (width - left - 4) / run.slots;
    run.stages.forEach((device, stage) => {
      label(svg, 0, stage * row + 18, width < 600 ? `stage ${stage}` : `stage ${stage} (${device || "not seen"})`, left - 8);
      draw(svg, "rect", {class: "hatch", x: left, y: stage * row + 2, width: run.slots * scale, height: row - 4});
    });
    run.ideal.forEach(([slot, stage, kind, batch]) =>
      block(svg, left + slot * scale, stage * row + 2, scale - 1, row - 4, kind, batch, `${kind} of micro-batch ${batch}, stage ${stage}: slot ${slot}`));
    label(svg, left, height - 6, "slot 0", 60, "soft");
    draw(svg, "text", {x: width - 2, y: height - 6, class: "soft", "text-anchor": "end"}, many(run.slots, "slot"));
  });
}
// Modules that are spread over devices: a bar per part, as long as its bytes, in boxes of equal width, one per layer.
function drawParts() {
  find("parts-part").hidden = !step.parts.length;
  const holder = find("parts");
  holder.replaceChildren();
  step.parts.forEach(({name, about, parts}) => {
    const width = holder.clientWidth || 320, row = 54, height = parts.length * row;
    const scale = (width - 2) / Math.max(1, ...parts.map((part) => part.nbytes));
    const svg = draw(holder, "svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `parts of ${name}: ${about.map((line) => line.trim()).join("; ")}`});
    parts.forEach(({layers, nbytes}, part) => {
      const y = part * row, wide = Math.max(2, nbytes * scale), each = wide / Math.max(1, layers.length);
      label(svg, 0, y + 16, about[part].trim(), width);
      if (each < 2) box(svg, 0, y + 22, wide, 24, colour(part), `${many(layers.length, "layer")}`);
      else layers.forEach((layer, index) => box(svg, index * each, y + 22, each - 1, 24, colour(part), layer));
    });
  });
}
function paragraph(text) {
  const made = document.createElement("p");
  made.textContent = text;
  return made;
}
function hatch(svg) {
  const pattern = draw(svg, "pattern", {id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)"});
  draw(pattern, "line", {x1: 0, y1: 0, x2: 0, y2: 6, stroke: "var(--soft)", "stroke-width": 1.5});
}
// Batches of predictors: a block each, and above it the wait of its oldest request; waits take turns on three heights.
function drawBatches() {
  const run = step.inference;
  find("inference-part").hidden = run === null;
  find("timeline-part").hidden = run !== null || step.name === "place";
  find("title").textContent = `${run ? "Inference" : step.name === "place" ? "A call of a placed module" : "A training step"}, as it was recorded`;
  if (!run) return;
  const all = run.batches.length + run.left_out, first = run.left_out ? Math.min(...run.batches.map((each) => each.asked)) : 0;
  find("inference-drawn").textContent = run.left_out ? `The last ${run.batches.length} of ${all} batches are drawn.` : "";
  const holder = find("inference"), width = holder.clientWidth || 320, row = 46, drawn = run.ranks.map(() => 0);
  const left = (width < 600 ? 84 : 150) + (run.ranks[0].startsWith("rank") ? 0 : 66);
  const height = run.ranks.length * row + 24, scale = (width - left - 4) / Math.max(step.us - first, 1e-3), at = (us) => left + (us - first) * scale;
  holder.replaceChildren();
  const svg = draw(holder, "svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${many(run.batches.length, "batch", "es")} from ${time(first)} to ${time(step.us)}`});
  hatch(svg);
  run.ranks.forEach((rank, index) => {
    label(svg, 0, index * row + 34, width < 600 ? rank.split(" (")[0] : rank, left - 8);
    draw(svg, "rect", {class: "hatch", x: left, y: index * row + 16, width: width - left - 4, height: 26});
  });
  run.batches.forEach((each, index) => {
    const x = at(each.begin), wide = Math.max(1.5, (each.end - each.begin) * scale), y = each.row * row;
    const about = `${many(each.rows, "row")} of ${many(each.requests, "request")}: ${time(each.end - each.begin)}; the oldest waited ${time(each.launched - each.asked)}`;
    const fill = `hsl(${(index * 67 + 212) % 360} 55% 42%)`;
    box(svg, at(each.asked), y + 3 + 4 * (drawn[each.row]++ % 3), Math.max(1, (each.launched - each.asked) * scale), 2, fill, about);
    box(svg, x, y + 16, wide, 26, fill, about);
    if (wide > 8 * String(each.rows).length + 2) draw(svg, "text", {class: "block", x: x + wide / 2, y: y + 33}, each.rows);
  });
  label(svg, left, height - 6, first ? time(first) : "0", 90, "soft");
  draw(svg, "text", {x: width - 2, y: height - 6, class: "soft", "text-anchor": "end"}, time(step.us));
}
function sceneNear(bar) {
  const distance = (each) => (each.kind === bar.name || each.operation === bar.name ? 0 : 1e12) + (each.bucket === bar.bucket ? 0 : 1e9) * (each.kind === "round") + Math.abs(each.begin - bar.begin);
  return step.scenes.reduce((best, each, index) => distance(each) < distance(step.scenes[best]) ? index : best, 0);
}

// Position.
function show() {
  const now = step.scenes[scene], at = now.begin + progress * (now.end - now.begin);
  const stills = Math.floor(progress * 24);
  if (picture.dataset.still !== `${scene} ${stills}`) {
    drawStill();
    picture.dataset.still = `${scene} ${stills}`;
  }
  picture.dataset.progress = progress.toFixed(3);
  move();
  find("scrub").value = scene + Math.min(progress, 0.999);
  find("scrub").setAttribute("aria-valuetext", `scene ${scene + 1} of ${step.scenes.length}: ${now.title}`);
  find("where").textContent = `scene ${scene + 1} of ${step.scenes.length}, ${time(at)} of ${time(step.us)}`;
  const line = find("now"), holder = find("timeline").dataset, x = Number(holder.left) + at * Number(holder.scale);
  line.setAttribute("x1", x);
  line.setAttribute("x2", x);
}
function go(index, way = 0) {
  scene = Math.max(0, Math.min(step.scenes.length - 1, index));
  progress = passed = way;
  const now = step.scenes[scene];
  find("scene-title").textContent = now.title;
  find("scene-text").textContent = now.text + (now.more ? ` ${now.more} more arrows are not drawn.` : "");
  for (const button of find("scenes").querySelectorAll("button")) button.removeAttribute("aria-current");
  const chosen = find("scenes").querySelectorAll("button")[scene];
  chosen.setAttribute("aria-current", "step");
  const list = find("scenes");
  if (chosen.offsetTop < list.scrollTop + list.offsetTop || chosen.offsetTop > list.scrollTop + list.offsetTop + list.clientHeight - 40)
    list.scrollTop = chosen.offsetTop - list.offsetTop - 60;
  drawScene();
  show();
}
function forward() {
  if (scene < step.scenes.length - 1) go(scene + 1, playing ? 0 : 1);
  else go(scene, 1);
}
function play(on) {
  playing = on;
  find("play").textContent = on ? "Pause" : "Play";
  if (on && scene === step.scenes.length - 1 && progress >= 1) go(0);
  before = 0;
  if (on) requestAnimationFrame(tick);
}
function tick(now) {
  if (!playing) return;
  const seconds = before ? (now - before) / 1000 : 0, length = SECONDS[step.scenes[scene].kind] / Number(find("speed").value);
  before = now;
  passed = Math.min(1, passed + seconds / length);
  progress = calm.matches ? Math.round(passed) : passed;  // who wants no motion sees the begin and the end
  show();
  if (passed >= 1) {
    if (scene === step.scenes.length - 1) { play(false); return; }
    go(scene + 1);
  }
  requestAnimationFrame(tick);
}

// Tables and lists.
function fillTable(table, heads, rows) {
  table.replaceChildren();
  const line = (cells, kind) => {
    const made = table.insertRow();
    cells.forEach((cell, index) => {
      const each = document.createElement(kind);
      each.textContent = cell;
      if (kind === "th") each.scope = "col";
      if (index === 2 && table.id === "buckets") each.className = "names";
      made.append(each);
    });
  };
  line(heads, "th");
  rows.forEach((row) => line(row, "td"));
}
function choose(index) {
  play(false);
  step = trace.steps[index];
  const team = step.devices.length ? ` ${many(step.devices.length, step.pipelines.length ? "stage" : "rank")} (${step.devices.map((each) => each || "not seen").join(", ")}),` : "";
  find("summary").textContent = `${step.name},${team} ${time(step.us)}${step.left_out && `. ${step.left_out}`}`;
  find("scrub").max = step.scenes.length - 0.001;
  find("scenes").replaceChildren(...step.scenes.map((each, index) => {
    const item = document.createElement("li"), button = document.createElement("button"), at = document.createElement("span");
    button.type = "button";
    button.textContent = each.title;
    at.className = "at";
    at.textContent = `at ${time(each.begin)}, takes ${time(each.end - each.begin)}`;
    button.append(at);
    button.addEventListener("click", () => { play(false); go(index, 1); });
    item.append(button);
    return item;
  }));
  find("phases-title").textContent = step.inference ? "Batches of each rank" : "Where the time goes";
  fillTable(find("phases"), step.table[0], step.table.slice(1).map((row) => row.map((cell) => cell.replace(/ us$/, " µs"))));
  find("legend").replaceChildren(...step.legend.map(paragraph));
  fillTable(find("buckets"), ["bucket", "bytes", "parameters"], step.buckets.map((each) => [
    each.bucket, bytes(each.nbytes.reduce((sum, size) => sum + size, 0)), each.names.join(", "),
  ]));
  find("bucket-part").hidden = find("boxes").hidden = !step.buckets.length;
  drawTimeline();
  drawPipelines();
  drawParts();
  drawBatches();
  go(0);
}

// Hands.
function theme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  find("theme").textContent = dark ? "Light" : "Dark";
  find("theme").setAttribute("aria-pressed", dark);
}
find("play").addEventListener("click", () => play(!playing));
find("next").addEventListener("click", () => { play(false); forward(); });
find("back").addEventListener("click", () => { play(false); go(scene - 1, 1); });
find("first").addEventListener("click", () => { play(false); go(0); });
find("last").addEventListener("click", () => { play(false); go(step.scenes.length - 1, 1); });
find("scrub").addEventListener("input", (event) => {
  play(false);
  const at = Number(event.target.value), index = Math.min(step.scenes.length - 1, Math.floor(at));
  if (index === scene) { progress = passed = at - index; show(); } else go(index, at - index);
});
find("step").addEventListener("change", (event) => choose(Number(event.target.value)));
find("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme !== "dark"));
document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || /^(SELECT|INPUT)$/.test(event.target.tagName)) return;
  const keys = {ArrowRight: "next", ArrowLeft: "back", Home: "first", End: "last"};
  if (keys[event.key]) find(keys[event.key]).click();
  else if (event.key === " " && event.target.tagName !== "BUTTON") find("play").click();
  else return;
  event.preventDefault();
});
// A button keeps the keys only where it was reached by them: after a click, space plays again.
document.addEventListener("click", (event) => { if (event.detail > 0 && document.activeElement.tagName === "BUTTON") document.activeElement.blur(); });
find("scrub").addEventListener("pointerup", (event) => event.target.blur());
document.addEventListener("pointermove", (event) => {
  const tip = find("tip"), text = event.target.dataset ? event.target.dataset.tip : undefined;
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${event.clientY + 40 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 12 : event.clientY + 16}px`;
});
let resizing;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => { drawTimeline(); drawPipelines(); drawParts(); drawBatches(); drawScene(); show(); }, 100);
});

theme(matchMedia("(prefers-color-scheme: dark)").matches);
find("step").replaceChildren(...trace.steps.map((each, index) => new Option(`${each.number}: ${each.name}, ${time(each.us)}`, index)));
find("left-out").textContent = [
  trace.left_out ? `${many(trace.left_out, "earlier step")} did not fit into the page.` : "",
  trace.dropped ? `${trace.dropped} events were too many to keep.` : "",
].join(" ");
find("environment").textContent = Object.entries(trace.environment).map(([name, value]) => `${name} ${value}`).join(" · ");
find("step").value = trace.steps.length - 1;
choose(trace.steps.length - 1);
