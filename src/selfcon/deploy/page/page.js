"use strict";
// What is shown is set as text, never as markup: class names may be anything.
const at = (id) => document.getElementById(id);
const make = (tag, text, name) => {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  return element;
};
const soft = (name) => name.replaceAll("_", "_\u200b"); // may go on in the next line there
const percent = (part) => `${(100 * part).toFixed(1)} %`;
let model = null;
let last = null; // the image that was asked about, and what came back
let turn = 0;

function say(text, wrong = false) {
  at("status").textContent = text;
  at("status").className = wrong ? "error" : "";
}

async function ask(path, options) {
  const response = await fetch(path, options);
  const found = await response.json();
  if (!response.ok) throw new Error(found.error || `The service answered ${response.status}.`);
  return found;
}

const post = (path, blob) =>
  ask(path, { method: "POST", body: blob, headers: { "Content-Type": blob.type.startsWith("image/") ? blob.type : "application/octet-stream" } });

async function show(blob) {
  const own = ++turn;
  say("Looking ...");
  try {
    const found = await post("v1/explain?top=" + Math.min(5, model.classes.length), blob);
    if (own !== turn) return;
    last = { blob, found, image: await createImageBitmap(blob) };
    at("result").hidden = false;
    draw();
    say("");
    if (innerWidth < 900) at("result").scrollIntoView({ behavior: "smooth" });
    if (model.gallery) await drawNeighbours(own);
  } catch (error) {
    if (own === turn) say(error.message, true);
  }
}

// The answer that a budget gives: the first one that is sure enough, as the rule says.
function decide() {
  const answers = last.found.answers;
  const point = model.curve.length ? model.curve[Number(at("budget").value)] : null;
  const number = point ? answers.findIndex((each, place) => each.sureness >= (point.thresholds[place] ?? 0)) : answers.length - 1;
  return { number: number < 0 ? answers.length - 1 : number, point };
}

function draw() {
  const { number, point } = decide();
  const chosen = last.found.answers[number];
  const best = chosen.classes[0];
  const silence = (point ? point.silence : model.silence)[chosen.name] ?? 0; // what is less probable is not given
  const unknown = chosen.strange || best.probability < silence;
  at("answer").textContent = `${unknown ? "Unknown; perhaps " : ""}${best.class}, ${percent(best.probability)}`;
  const cost = model.costs[number] ?? 1;
  at("verdict").textContent = `answered by ${chosen.name}` +
    (cost < 1 ? `, which saves ${percent(1 - cost)} of the computation` : "");
  if (point) at("spent").textContent = `${percent(point.cost)} of the whole computation on average; ${point.accuracy.toFixed(1)} % of held-out images right`;
  const place = at("exits");
  const together = chosen.name !== chosen.exit; // several exits answer as one
  place.replaceChildren();
  last.found.answers.forEach((each, index) => {
    const name = each.exit;
    const exit = last.found.exits[name];
    const answers = index === number && !together;
    const card = make("article", undefined, "exit" + (answers ? " chosen" : index > number ? " unused" : ""));
    const title = make("h3", name);
    title.append(make("small", answers ? "answers here" : index > number ? "not needed" : together ? "has its say" : "not sure enough"));
    card.append(title, overlay(exit.map, name), ...guesses(exit.classes));
    place.append(card);
  });
  if (!together) return;
  const card = make("article", undefined, "exit chosen");
  const title = make("h3", chosen.name);
  title.append(make("small", "answers here"));
  card.append(title, ...guesses(chosen.classes));
  place.append(card);
}

function guesses(classes) {
  return classes.map((guess) => {
    const row = make("div", undefined, "guess");
    const bar = make("progress");
    bar.max = 1;
    bar.value = guess.probability;
    bar.setAttribute("aria-label", guess.class);
    row.append(make("span", soft(guess.class)), make("span", percent(guess.probability)), bar);
    return row;
  });
}

function overlay(map, name) {
  const side = 224, canvas = make("canvas");
  canvas.width = canvas.height = side;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", map ? `where ${name} looks` : `what ${name} sees`);
  const pen = canvas.getContext("2d"), image = last.image;
  const whole = image.width === model.image_size && image.height === model.image_size;
  const part = Math.min(image.width, image.height) * (whole ? 1 : model.part_seen); // what the network saw of it
  if (map) pen.filter = "grayscale(1)"; // so that warm places stand out
  pen.drawImage(image, (image.width - part) / 2, (image.height - part) / 2, part, part, 0, 0, side, side);
  pen.filter = "none";
  if (!map) return canvas;
  const heat = make("canvas");
  heat.width = map[0].length;
  heat.height = map.length;
  const small = heat.getContext("2d"), pixels = small.createImageData(heat.width, heat.height);
  map.flat().forEach((warm, index) => pixels.data.set([255, 120 * (1 - warm) + 60, 0, 190 * warm], 4 * index));
  small.putImageData(pixels, 0, 0);
  pen.imageSmoothingEnabled = true;
  pen.drawImage(heat, 0, 0, side, side);
  return canvas;
}

async function drawNeighbours(own) {
  const found = await post(`v1/neighbours?k=8&exit=${encodeURIComponent(at("which").value)}`, last.blob);
  if (own !== turn) return;
  at("near").hidden = false;
  at("neighbours").replaceChildren(...found.neighbours[0].map((each) => {
    const tile = make("div"), image = make("img");
    image.src = `v1/images/train/${each.image}.png`;
    image.alt = each.class;
    tile.append(image, make("span", `${soft(each.class)} (${each.cosine.toFixed(2)})`));
    return tile;
  }));
}

async function drawSamples() {
  const { samples } = await ask("v1/samples");
  at("tries").hidden = false;
  at("samples").replaceChildren(...samples.map((each) => {
    const button = make("button"), image = make("img");
    button.type = "button";
    image.src = `v1/images/test/${each.image}.png`;
    image.alt = each.class;
    image.loading = "lazy";
    button.append(image, make("span", soft(each.class)));
    button.addEventListener("click", async () => show(await (await fetch(image.src)).blob()));
    return button;
  }));
}

let stream = null;
async function openCamera() {
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
    at("video").srcObject = stream;
    await at("video").play();
    at("shoot").hidden = false;
  } catch {
    say("There is no camera that this page may use.", true);
  }
}

function snap() {
  const video = at("video"), canvas = make("canvas");
  canvas.width = video.videoWidth;
  canvas.height = video.videoHeight;
  canvas.getContext("2d").drawImage(video, 0, 0);
  stream.getTracks().forEach((track) => track.stop());
  at("shoot").hidden = true;
  canvas.toBlob((blob) => show(blob), "image/png");
}

function listen() {
  const drop = at("drop"), file = at("file");
  file.addEventListener("change", () => file.files[0] && show(file.files[0]));
  drop.addEventListener("keydown", (event) => (event.key === "Enter" || event.key === " ") && file.click());
  for (const kind of ["dragenter", "dragover"]) drop.addEventListener(kind, (event) => { event.preventDefault(); drop.classList.add("over"); });
  for (const kind of ["dragleave", "drop"]) drop.addEventListener(kind, () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => { event.preventDefault(); if (event.dataTransfer.files[0]) show(event.dataTransfer.files[0]); });
  document.addEventListener("paste", (event) => { const pasted = [...event.clipboardData.files][0]; if (pasted) show(pasted); });
  at("camera").addEventListener("click", openCamera);
  at("snap").addEventListener("click", snap);
  at("budget").addEventListener("input", () => last && draw());
  at("which").addEventListener("change", () => last && drawNeighbours(turn));
}

async function begin() {
  listen();
  try {
    model = await ask("v1/model");
    document.title = `${model.name} · selfcon`;
    at("name").textContent = model.name;
    at("about").textContent = `${model.network}, trained by ${model.method}: ${model.classes.length} classes, exits ${model.exits.join(", ")}` +
      (model.calibrated ? "" : "; not calibrated");
    at("which").replaceChildren(...[...model.exits].reverse().map((name) => make("option", name)));
    if (model.curve.length) {
      at("budgeting").hidden = false;
      at("budget").max = model.curve.length - 1;
      const chosen = model.curve.findIndex((point) => point.thresholds.join() === model.thresholds.join());
      at("budget").value = chosen < 0 ? model.curve.length - 1 : chosen;
    }
    if (model.gallery) await drawSamples();
    const wish = location.hash.match(/^#(test|train)\/\d+$/); // a link to an image of the data
    if (wish) await show(await (await fetch(`v1/images/${wish[0].slice(1)}.png`)).blob());
  } catch (error) {
    say(error.message, true);
  }
}
begin();
