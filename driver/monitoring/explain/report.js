// The timeline of a job, and what it has reported. All text is set as text, never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const css = getComputedStyle(document.documentElement);
const colour = name => css.getPropertyValue("--" + name).trim();
const whole = Math.max(data.seconds, 1e-3);
let from = 0, to = whole;

function clock(s) {
  if (Math.abs(s) < 60) return s.toFixed(to - from < 10 ? 2 : 1) + " s";
  const t = Math.round(s), h = Math.floor(t / 3600), m = Math.floor(t / 60) % 60;
  return (h ? h + ":" + String(m).padStart(2, "0") : m) + ":" + String(t % 60).padStart(2, "0");
}

function ticks(low, high, count) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
  const rough = (high - low) / count;
  let step = steps.find(each => each >= rough) || Math.ceil(rough / 86400) * 86400;
  if (rough < 1) {
    const power = 10 ** Math.floor(Math.log10(rough));
    step = power * [1, 2, 5, 10].find(times => power * times >= rough);
  }
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) found.push(at);
  return found;
}

function fit(canvas, height) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = height + "px";
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "11px system-ui, sans-serif";
  return [pen, width];
}

const names = Object.keys(data.rows);
const LEFT = names.length > 60 ? 8 : Math.min(150, 14 + 7 * Math.max(6, ...names.map(each => each.length)));
const ROW = names.length <= 40 ? 18 : names.length <= 200 ? 8 : 3;
const TOP = 74;
const canvas = document.getElementById("timeline");

function draw() {
  if (!canvas) return;
  const height = TOP + ROW * names.length + 22;
  const [pen, width] = fit(canvas, height);
  const x = at => LEFT + (at - from) / (to - from) * (width - LEFT - 8);
  const clip = at => Math.min(Math.max(x(at), LEFT), width - 8);
  pen.fillStyle = colour("faint");
  pen.strokeStyle = colour("line");
  for (const at of ticks(from, to, Math.max(2, width / 110))) {
    pen.beginPath(); pen.moveTo(x(at), 14); pen.lineTo(x(at), height - 16); pen.stroke();
    pen.fillText(clock(at), Math.min(x(at) - 8, width - 44), height - 4);
  }
  // The size of the world, as stairs.
  const most = Math.max(1, ...data.worlds.map(each => each[1]));
  const y = size => TOP - 10 - size / most * (TOP - 26);
  pen.fillText("workers in the world, up to " + most, LEFT, 10);
  pen.fillStyle = colour("training");
  pen.globalAlpha = 0.35;
  data.worlds.forEach((world, index) => {
    const next = index + 1 < data.worlds.length ? data.worlds[index + 1][0] : whole;
    if (next >= from && world[0] <= to)
      pen.fillRect(clip(world[0]), y(world[1]), Math.max(1, clip(next) - clip(world[0])), y(0) - y(world[1]));
  });
  pen.globalAlpha = 1;
  const states = data.states.map(colour);
  names.forEach((name, index) => {
    const top = TOP + index * ROW;
    if (LEFT > 20) { pen.fillStyle = colour("faint"); pen.fillText(name, 2, top + ROW - 5, LEFT - 8); }
    let drawn = -1;
    for (const [start, end, state, , rank] of data.rows[name]) {
      if (end < from || start > to) continue;
      const left = clip(start), right = clip(end);
      if (right - left < 0.4 && right <= drawn) continue;  // thousands in one pixel
      drawn = Math.max(right, left + 0.8);
      pen.fillStyle = states[state];
      pen.fillRect(left, top, drawn - left, ROW - (ROW > 4 ? 2 : 0));
      if (ROW > 12 && right - left > 24 && rank >= 0) { pen.fillStyle = "#fff"; pen.fillText(rank, left + 4, top + ROW - 6); }
    }
  });
  pen.fillStyle = colour("lost");
  for (const [at, row] of data.deaths) {
    if (at < from || at > to) continue;
    const top = TOP + names.indexOf(row) * ROW;
    pen.fillRect(x(at) - 1, top - (ROW > 4 ? 2 : 0), 2.5, ROW + (ROW > 4 ? 2 : 0));
    pen.beginPath(); pen.arc(x(at), 18, 3, 0, 7); pen.fill();
  }
  document.getElementById("range").textContent = clock(from) + " to " + clock(to);
}

function zoom(factor, about) {
  const middle = about === undefined ? (from + to) / 2 : about;
  const span = Math.min(whole, Math.max(0.01, (to - from) * factor));
  const share = (middle - from) / (to - from);
  from = Math.min(Math.max(0, middle - share * span), whole - span);
  to = from + span;
  draw();
}

function move(seconds) {
  const span = to - from;
  from = Math.min(Math.max(0, from + seconds), whole - span);
  to = from + span;
  draw();
}

function timeOf(event) {
  const box = canvas.getBoundingClientRect();
  return from + (event.clientX - box.left - LEFT) / (box.width - LEFT - 8) * (to - from);
}

function tell(event) {
  const box = canvas.getBoundingClientRect(), at = timeOf(event);
  const index = Math.floor((event.clientY - box.top - TOP) / ROW);
  const lines = [];
  if (names[index] !== undefined) {
    const span = data.rows[names[index]].find(each => each[0] <= at && at <= each[1]);
    if (span) {
      const rank = span[4] >= 0 ? ", rank " + span[4] : "";
      lines.push(names[index] + "#" + span[3] + " is " + data.states[span[2]] + rank + " from " + clock(span[0]) + " to " + clock(span[1]));
    }
  }
  const stall = data.stalls.find(each => each[0] <= at && at <= each[1]);
  if (stall) lines.push("stalled for " + (stall[1] - stall[0]).toFixed(1) + " s: " + stall[2]);
  const near = data.recoveries.find(each => each[0] <= at && at <= Math.max(each[1], each[0] + (to - from) / 200));
  if (near) lines.push(near[3] + " to generation " + near[2] + ": " + (1000 * (near[1] - near[0])).toFixed(0) + " ms");
  document.getElementById("under").textContent = lines.join("; ") || clock(at);
}

if (canvas) {
  let dragged = null;
  canvas.addEventListener("wheel", event => {
    if (event.shiftKey) move((to - from) * Math.sign(event.deltaY || event.deltaX) / 8);
    else zoom(event.deltaY > 0 ? 1.25 : 0.8, timeOf(event));
    event.preventDefault();
  }, {passive: false});
  canvas.addEventListener("pointerdown", event => { dragged = event.clientX; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", event => {
    if (dragged !== null) {
      move((dragged - event.clientX) / (canvas.clientWidth - LEFT - 8) * (to - from));
      dragged = event.clientX;
    } else tell(event);
  });
  canvas.addEventListener("pointerup", () => { dragged = null; });
  canvas.addEventListener("pointercancel", () => { dragged = null; });
  canvas.addEventListener("keydown", event => {
    const span = to - from;
    const ways = {"+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1.7), "0": () => zoom(1e9),
      ArrowLeft: () => move(-span / 6), ArrowRight: () => move(span / 6)};
    if (ways[event.key]) { ways[event.key](); event.preventDefault(); }
  });
  document.getElementById("in").addEventListener("click", () => zoom(0.6));
  document.getElementById("out").addEventListener("click", () => zoom(1.7));
  document.getElementById("all").addEventListener("click", () => zoom(1e9));
  document.getElementById("left").addEventListener("click", () => move((from - to) / 4));
  document.getElementById("right").addEventListener("click", () => move((to - from) / 4));
}

const series = Object.entries(data.series);
Charts.several(document.getElementById("charts"), series,
  {shown: series.length, clock, marks: data.deaths.map(each => each[0]), from: 0, to: whole});

window.addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
