const UNKNOWN = "words that the model does not know: "; // how the warning of a job begins
const WORDS = {
  en: {prompt: "Prompt", negative: "Not in the picture", models: "Models, side by side", width: "Width", height: "Height",
    steps: "Steps", pictures: "Pictures", guidance: "Guidance", sampler: "Sampler", seed: "Seed", lock: "Keep this seed",
    more: "More settings", rescale: "Guidance rescale", eta: "Eta (ddim)", spacing: "Timestep spacing", sigmas: "Sigmas",
    interval: "Guide at shares of noise", zero: "CFG-Zero* (flow)",
    from: "Start from a picture", file: "Picture", strength: "How much to change", brush: "Brush", clear: "Clear the mask",
    paint: "Paint over what is to be drawn anew: with a mouse, a finger, a pen, or arrow keys and the space bar. Without paint, all of it is drawn anew.",
    without: "Without the picture", draw: "Draw", keys: "Ctrl + Enter draws, Escape cancels. Arrow keys move among pictures, Enter enlarges one.",
    usual: "the model's own", previous: "Previous", next: "Next", download: "Download", again: "Use these settings",
    start: "Start from it", close: "Close", cancel: "Cancel", remove: "Remove", use: "Use it", empty: "Nothing is drawn yet. Write what the picture should show, and press Draw.",
    example: "Draw an example", waiting: place => place ? `waiting, ${place} ahead` : "waiting",
    drawing: job => `step ${job.step} of ${job.num_steps}` + (job.seconds_left === null ? "" : `, ${span(job.seconds_left)} left`),
    done: job => `${job.num_pictures} picture${job.num_pictures === 1 ? "" : "s"} in ${span(job.seconds)}`,
    cancelled: "cancelled", failed: "failed", none: "choose a model", token: "Token", model: "Model", index: "Number",
    unknown: UNKNOWN},
  zh: {prompt: "提示词", negative: "不要出现的内容", models: "模型（并排比较）", width: "宽", height: "高",
    steps: "步数", pictures: "张数", guidance: "引导强度", sampler: "采样器", seed: "随机种子", lock: "固定种子",
    more: "更多设置", rescale: "引导重缩放", eta: "eta（ddim）", spacing: "时间步间隔", sigmas: "sigma 序列",
    interval: "引导的噪声区间", zero: "CFG-Zero*（flow）",
    from: "从一张图片开始", file: "图片", strength: "改动程度", brush: "画笔大小", clear: "清除遮罩",
    paint: "涂抹需要重画的部分：可用鼠标、手指、笔，或方向键加空格键。不涂抹则整张重画。",
    without: "不用这张图片", draw: "生成", keys: "Ctrl + Enter 生成，Esc 取消。方向键在图片间移动，Enter 放大。",
    usual: "模型默认", previous: "上一张", next: "下一张", download: "下载", again: "使用这些设置",
    start: "从它开始", close: "关闭", cancel: "取消", remove: "删除", use: "使用", empty: "还没有图片。写下要画的内容，然后按“生成”。",
    example: "画一个例子", waiting: place => place ? `排队中，前面还有 ${place} 个` : "排队中",
    drawing: job => `第 ${job.step} 步，共 ${job.num_steps} 步` + (job.seconds_left === null ? "" : `，剩余 ${span(job.seconds_left)}`),
    done: job => `${job.num_pictures} 张，用时 ${span(job.seconds)}`, cancelled: "已取消", failed: "失败",
    none: "请选择一个模型", token: "令牌", model: "模型", index: "编号", unknown: "模型不认识的词："},
};
const NUMBERS = ["width", "height", "num_inference_steps", "num_samples", "guidance_scale", "seed", "guidance_rescale", "eta"];
const CHOICES = ["sampler", "timestep_spacing", "sigma_schedule"];
const NEWEST = 60, SEEDS = 2 ** 31; // jobs that are shown; seeds that are drawn
let words = WORDS.en, parameters = {}, models = [];
const mine = new Set(); // jobs that were asked for here

function span(seconds) {
  return seconds < 10 ? `${seconds.toFixed(1)} s` : seconds < 90 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`;
}

// ---- language
function speak(language) {
  words = WORDS[language];
  document.documentElement.lang = language;
  for (const one of document.querySelectorAll("[data-word]")) one.textContent = words[one.dataset.word];
  for (const one of document.querySelectorAll("[data-title]")) one.setAttribute("aria-label", words[one.dataset.title]);
  for (const one of document.querySelectorAll("option[value='']")) one.textContent = words.usual;
  for (const group of groups.values()) group.seen = "";
}
field("language").addEventListener("input", () => {
  keepLanguage();
  speak(field("language").value);
  refresh();
});

// ---- the form
const chosen = () => [...document.querySelectorAll("#models input:checked")].map(one => one.value);
function fill(select, values) {
  const before = select.value;
  select.replaceChildren(make("option", {value: ""}, words.usual), ...values.map(value => make("option", {value}, value)));
  if (values.includes(before)) select.value = before;
}
const examples = () => [...new Set(models.map(one => one.example_prompt).filter(Boolean))];
const usual = {guidance_scale: "", num_inference_steps: ""}; // of the chosen models, where they agree
function offerTheirs() {
  const own = models.filter(one => chosen().includes(one.name)), samplers = own.map(one => one.samplers);
  fill(field("sampler"), (samplers[0] || []).filter(name => samplers.every(names => names.includes(name))));
  for (const [name, before] of Object.entries(usual)) {
    const values = [...new Set(own.map(one => one[name]))];
    field(name).placeholder = values.join(", ");
    usual[name] = values.length === 1 ? String(values[0]) : "";
    if (field(name).value === before) field(name).value = usual[name];
  }
  field("prompt").placeholder = examples()[0] || "";
}
function setUp(found) {
  ({models, parameters} = found);
  document.title = `${models.map(one => one.name).join(", ")} - ppldm app`;
  for (const [number, one] of models.entries()) {
    const box = make("input", {type: "checkbox", value: one.name, checked: number < 2});
    box.addEventListener("input", offerTheirs);
    field("models").append(make("label", {}, box, [one.name, ...one.lora].join(" + ")));
  }
  field("models").hidden = models.length < 2;
  for (const name of NUMBERS) {
    const known = parameters[name], size = name === "width" || name === "height";
    field(name).max = name === "seed" ? SEEDS - 1 : known.maximum;
    field(name).value = size ? models[0].resolution : known.default ?? "";
  }
  field("seed").value = ""; // one is drawn, and shown then
  field("num_samples").value = Math.min(4, parameters.num_samples.maximum);
  document.querySelector("main").hidden = false;
  field("prompt").focus();
  offerTheirs();
  for (const name of CHOICES.slice(1)) fill(field(name), parameters[name].enum);
  field("from").hidden = field("start").hidden = !("image" in parameters);
}
function settings() {
  const asked = {prompt: field("prompt").value, negative_prompt: field("negative_prompt").value};
  for (const name of NUMBERS) if (field(name).value !== "") asked[name] = Number(field(name).value);
  for (const name of CHOICES) if (field(name).value) asked[name] = field(name).value;
  const interval = field("guidance_interval").value.match(/[^\s,]+/g);
  if (interval) asked.guidance_interval = interval.map(Number);
  return {...asked, cfg_zero: field("cfg_zero").checked, ...picture.asked()};
}
function useSettings(used) {
  for (const name of ["prompt", "negative_prompt", ...NUMBERS]) if (used[name] !== undefined) field(name).value = used[name];
  for (const name of CHOICES) field(name).value = used[name] || "";
  field("guidance_interval").value = (used.guidance_interval || []).join(" ");
  field("cfg_zero").checked = used.cfg_zero;
  field("lock").checked = true;
}
field("seed").addEventListener("input", () => { field("lock").checked = field("seed").value !== ""; });
field("lock").addEventListener("input", () => { if (!field("lock").checked) field("seed").value = ""; });
field("form").addEventListener("submit", event => event.preventDefault());
const submit = trying(async () => {
  if (!chosen().length) throw new Error(words.none);
  if (!field("lock").checked || field("seed").value === "") field("seed").value = Math.floor(Math.random() * SEEDS);
  const asked = settings();
  for (const model of chosen()) mine.add((await (await ask("v1/pictures", {...asked, model})).json()).id);
  say();
  await refresh();
  if (field("gallery").getBoundingClientRect().top > innerHeight / 2) field("gallery").scrollIntoView(); // of a phone
});
field("draw").addEventListener("click", submit);
const cancelMine = trying(async () => {
  const {jobs} = await (await ask(`v1/jobs?newest=${NEWEST}`)).json();
  for (const job of jobs) if (mine.has(job.id) && isGoing(job)) await ask(`v1/jobs/${job.id}`, undefined, "DELETE");
  refresh();
});
document.addEventListener("keydown", event => {
  if (field("large").open || event.isComposing) return; // Enter and Escape of a half-typed Chinese word are not ours
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); submit(); }
  if (event.key === "Escape") cancelMine();
});

// ---- a picture to start from, and the mask that is painted over it
const picture = (() => {
  const canvas = field("canvas"), pen = canvas.getContext("2d"), mask = document.createElement("canvas");
  const paint = mask.getContext("2d");
  let image = null, last = null, painted = false, cursor = null;
  function show() {
    pen.globalAlpha = 1;
    const scale = Math.max(canvas.width / image.width, canvas.height / image.height);
    const [width, height] = [image.width * scale, image.height * scale];
    pen.drawImage(image, (canvas.width - width) / 2, (canvas.height - height) / 2, width, height);
    pen.globalAlpha = 0.55;
    pen.drawImage(mask, 0, 0);
    pen.globalAlpha = 1;
    if (!cursor) return;
    pen.strokeStyle = "#d55e00";
    pen.strokeRect(cursor[0] - 4, cursor[1] - 4, 8, 8);
  }
  function fit() {
    if (!image) return;
    for (const one of [canvas, mask]) { one.width = Number(field("width").value) || 8; one.height = Number(field("height").value) || 8; }
    painted = false;
    cursor = null;
    show();
  }
  function stroke(to) {
    paint.strokeStyle = paint.fillStyle = "#f0f";
    paint.lineCap = "round";
    paint.lineWidth = Number(field("brush").value) / 100 * canvas.width;
    paint.beginPath();
    paint.arc(...to, paint.lineWidth / 2, 0, 2 * Math.PI); // a line from a point to itself is none
    paint.fill();
    paint.beginPath();
    paint.moveTo(...(last || to));
    paint.lineTo(...to);
    paint.stroke();
    last = to;
    painted = true;
    show();
  }
  const place = event => {
    const box = canvas.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width * canvas.width, (event.clientY - box.top) / box.height * canvas.height];
  };
  canvas.addEventListener("pointerdown", event => { canvas.setPointerCapture(event.pointerId); last = null; stroke(place(event)); });
  canvas.addEventListener("pointermove", event => { if (event.buttons) stroke(place(event)); });
  canvas.addEventListener("keydown", event => {
    const step = canvas.width / 32, by = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]}[event.key];
    if (!by && event.key !== " ") return;
    event.preventDefault();
    cursor = cursor || [canvas.width / 2, canvas.height / 2];
    if (by) {
      cursor = [Math.min(canvas.width, Math.max(0, cursor[0] + by[0] * step)), Math.min(canvas.height, Math.max(0, cursor[1] + by[1] * step))];
      show();
    } else { last = null; stroke(cursor); }
  });
  function drop() {
    image = null;
    field("given").hidden = true;
    field("file").value = "";
  }
  async function take(file) {
    image = await createImageBitmap(file);
    field("given").hidden = false;
    field("from").open = true;
    fit();
  }
  const as = one => one.toDataURL("image/png");
  function asked() {
    if (!image) return {};
    const plain = document.createElement("canvas"), two = document.createElement("canvas");
    for (const one of [plain, two]) { one.width = canvas.width; one.height = canvas.height; }
    cursor = null;
    const scale = Math.max(canvas.width / image.width, canvas.height / image.height);
    plain.getContext("2d").drawImage(image, (canvas.width - image.width * scale) / 2, (canvas.height - image.height * scale) / 2,
      image.width * scale, image.height * scale);
    const found = {image: as(plain), strength: Number(field("strength").value)};
    if (!painted) return found;
    const white = two.getContext("2d");
    white.drawImage(mask, 0, 0);
    white.globalCompositeOperation = "source-in";
    white.fillStyle = "#fff";
    white.fillRect(0, 0, two.width, two.height);
    white.globalCompositeOperation = "destination-over";
    white.fillStyle = "#000";
    white.fillRect(0, 0, two.width, two.height);
    return {...found, mask: as(two)};
  }
  field("file").addEventListener("input", trying(async () => { if (field("file").files.length) await take(field("file").files[0]); }));
  field("clear").addEventListener("click", fit);
  field("without").addEventListener("click", drop);
  for (const side of ["width", "height"]) field(side).addEventListener("change", fit);
  const showStrength = () => { field("strength_shown").textContent = field("strength").value; };
  field("strength").addEventListener("input", showStrength);
  showStrength();
  return {asked, take, drop};
})();

// ---- queue and gallery: jobs that differ by their model alone stand side by side
const groups = new Map(), urls = new Map();
const isGoing = job => ["waiting", "drawing"].includes(job.state);
async function urlOf(job, number) {
  const key = `${job.id}/${number}`;
  if (!urls.has(key)) {
    urls.set(key, ask(`v1/jobs/${job.id}/pictures/${number}`).then(answer => answer.blob())
      .then(blob => ({blob, url: URL.createObjectURL(blob)})));
    urls.get(key).catch(() => urls.delete(key));
  }
  return urls.get(key);
}
const act = (job, word) => {
  const button = make("button", {type: "button"}, words[word]);
  button.addEventListener("click", trying(async () => {
    await ask(`v1/jobs/${job.id}`, undefined, "DELETE");
    refresh();
  }));
  return button;
};
function stateOf(job) {
  const line = make("div", {className: "state"});
  if (job.state === "drawing") line.append(make("progress", {max: job.num_steps, value: job.step}));
  line.append({waiting: () => words.waiting(job.place), drawing: () => words.drawing(job), done: () => words.done(job),
    cancelled: () => words.cancelled, failed: () => words.failed}[job.state](), act(job, isGoing(job) ? "cancel" : "remove"));
  return line;
}
async function showSide(side, job) {
  const state = JSON.stringify([job.state, job.step, job.place, job.num_pictures, words === WORDS.zh]);
  if (side.seen === state) return;
  side.seen = state;
  const held = side.element.contains(document.activeElement) && document.activeElement.closest(".state");
  side.state.replaceChildren(stateOf(job));
  if (held) side.state.querySelector("button").focus();
  side.note.replaceChildren(...[["bad", job.error], ["note", job.warning.replace(UNKNOWN, words.unknown)]].filter(one => one[1])
    .map(([className, text]) => make("p", {className}, text)));
  while (side.pictures.children.length < job.num_pictures) {
    const number = side.pictures.children.length, image = make("img", {alt: job.settings.prompt});
    const button = make("button", {type: "button", className: "one"}, image);
    button.addEventListener("click", () => enlarge(button));
    button.picture = {job, number};
    side.pictures.append(button);
    urlOf(job, number).then(found => { image.src = found.url; }, () => { button.remove(); });
  }
  if (job.has_preview && job.state === "drawing") {
    const answer = await ask(`v1/jobs/${job.id}/preview`).catch(() => null); // it may have ended by now
    if (answer) {
      const url = URL.createObjectURL(await answer.blob());
      side.preview.addEventListener("load", () => URL.revokeObjectURL(url), {once: true});
      side.preview.src = url;
    }
    const count = Math.min(job.settings.num_samples, 8);
    side.preview.style.width = `${Math.max(128, Math.min(256, job.settings.width)) * count}px`;
  }
  side.preview.hidden = !job.has_preview;
}
function makeSide(job, several) {
  const side = {state: make("div"), note: make("div"), pictures: make("div", {className: "pictures"}),
    preview: make("img", {className: "preview", hidden: true, alt: ""}), seen: ""};
  side.element = make("div", {className: "side"}, ...(several ? [make("h3", {}, job.settings.model)] : []), side.state,
    side.note, side.preview, side.pictures);
  return side;
}
function groupsOf(jobs) {
  const found = [];
  for (const job of jobs) {
    const {model, sampler, ...rest} = job.settings, key = JSON.stringify(rest), last = found.at(-1);
    if (last && last.key === key && !last.jobs.some(one => one.settings.model === model)) last.jobs.push(job);
    else found.push({key, jobs: [job]});
  }
  return found.reverse();
}
// What to do, as long as nothing is drawn; an example is one of the prompts that the model's training has shown.
function showEmpty(isEmpty) {
  const before = field("gallery").querySelector(".empty"), state = JSON.stringify([words.empty, examples()]);
  if (isEmpty && before?.seen === state) return;
  before?.remove();
  if (!isEmpty) return;
  const made = make("div", {className: "empty"}, make("p", {}, words.empty));
  made.seen = state;
  for (const prompt of examples()) {
    const button = make("button", {type: "button"}, `${words.example}: ${prompt}`);
    button.addEventListener("click", () => { field("prompt").value = prompt; submit(); });
    made.append(button);
  }
  field("gallery").append(made);
}
function showJobs(jobs) {
  const shown = groupsOf(jobs), names = new Set(), held = document.activeElement.closest("article");
  const heldAt = [...field("gallery").children].indexOf(held);
  shown.forEach((group, place) => {
    const name = group.jobs[0].id, ids = group.jobs.map(job => job.id).join();
    names.add(name);
    let known = groups.get(name);
    if (!known || known.ids !== ids) {
      if (known) known.element.remove();
      const used = group.jobs[0].settings, several = models.length > 1;
      known = {ids, sides: group.jobs.map(job => makeSide(job, several))};
      known.element = make("article", {}, make("h2", {}, used.prompt),
        make("div", {className: "sides"}, ...known.sides.map(side => side.element)));
      groups.set(name, known);
    }
    if (field("gallery").children[place] !== known.element) field("gallery").insertBefore(known.element, field("gallery").children[place]);
    group.jobs.forEach((job, number) => trying(showSide)(known.sides[number], job));
  });
  for (const [name, group] of groups) if (!names.has(name)) { group.element.remove(); groups.delete(name); }
  const ids = new Set(jobs.map(job => job.id));
  for (const [key, found] of urls) {
    if (!ids.has(key.split("/")[0])) { urls.delete(key); found.then(one => URL.revokeObjectURL(one.url), () => {}); }
  }
  showEmpty(!jobs.length);
  if (held && !held.isConnected) { // the keyboard goes on from what took its place
    const next = field("gallery").children[Math.min(heldAt, field("gallery").children.length - 1)];
    (next.querySelector("button") || field("prompt")).focus();
  }
}

// ---- one picture, large
let current = null;
const IDLE = {guidance_rescale: 0, eta: 0, strength: 1, cfg_zero: false}; // what says nothing
const labelOf = name => words[name] || field(name).closest("label").querySelector("span").textContent;
const all = () => [...document.querySelectorAll(".pictures .one")];
async function enlarge(button) {
  if (!button) return;
  const {job, number} = current = button.picture, found = await urlOf(job, number);
  current.button = button;
  field("shown").src = found.url;
  field("shown").alt = job.settings.prompt;
  field("download").href = found.url;
  field("download").download = `${job.id}-${String(number).padStart(2, "0")}.png`;
  const facts = Object.entries(job.settings).filter(([name, value]) => value !== null && value !== "" && value !== IDLE[name]);
  field("facts").replaceChildren(...[...facts, ["index", number]].flatMap(([name, value]) =>
    [make("dt", {}, labelOf(name)), make("dd", {}, String(value))]));
  if (!field("large").open) field("large").showModal();
}
const move = by => { const buttons = all(); return buttons[buttons.indexOf(current.button) + by]; };
field("previous").addEventListener("click", () => enlarge(move(-1)));
field("next").addEventListener("click", () => enlarge(move(1)));
field("close").addEventListener("click", () => field("large").close());
field("large").addEventListener("close", () => current.button.focus());
field("again").addEventListener("click", () => { useSettings(current.job.settings); field("large").close(); });
field("start").addEventListener("click", trying(async () => {
  const {blob} = await urlOf(current.job, current.number);
  field("large").close(); // before there is something to paint on, so that this keeps the focus
  await picture.take(blob);
}));
field("large").addEventListener("keydown", event => {
  const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
  if (by) { event.preventDefault(); enlarge(move(by)); }
});
field("gallery").addEventListener("keydown", event => {
  const by = {ArrowLeft: -1, ArrowRight: 1}[event.key], buttons = all(), at = buttons.indexOf(document.activeElement);
  if (by && at >= 0 && buttons[at + by]) { event.preventDefault(); buttons[at + by].focus(); }
});

// ---- from time to time
let timer = 0;
async function refresh() {
  clearTimeout(timer);
  let busy = false;
  if (!document.hidden && await trying(async () => {
    if (!models.length) setUp(await (await ask("v1/models")).json());
    const {jobs} = await (await ask(`v1/jobs?newest=${NEWEST}`)).json();
    busy = jobs.some(isGoing);
    showJobs(jobs);
  })() && field("error").textContent.startsWith("ppldm does not")) say();
  timer = setTimeout(refresh, busy ? 500 : 4000);
}
document.addEventListener("visibilitychange", () => document.hidden || refresh());
field("language").value = readLanguage();
speak(readLanguage());
refresh();
