// What the pages of this package have in common. A page has #error and the form #ask, and a function refresh().
const field = id => document.getElementById(id);
// All text is set as text: names, prompts and settings are not ours.
function make(tag, settings, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(settings || {})) {
    if (name in made) made[name] = value; else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}
// "en" or "zh": as chosen in #language at any time, else as the browser is set. A page in a frame may have no storage.
const stored = action => { try { return action(localStorage); } catch { return null; } };
const readLanguage = () => stored(place => place.getItem("language")) || (navigator.language.startsWith("zh") ? "zh" : "en");
const keepLanguage = () => stored(place => place.setItem("language", field("language").value));
const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  sessionStorage.setItem("token", given);
  history.replaceState(null, "", location.pathname);
}
async function ask(path, body, method) {
  const settings = {headers: {"X-Token": sessionStorage.getItem("token") || ""}, method};
  if (body) {
    settings.method = "POST";
    settings.headers["Content-Type"] = "application/json";
    settings.body = JSON.stringify(body);
  }
  const answer = await fetch(path, settings);
  if (answer.ok) return answer;
  const isAsked = answer.status === 401 && field("ask").hidden;
  field("ask").hidden = answer.status !== 401;
  if (isAsked) field("token").focus();
  let words = `HTTP ${answer.status}`;
  try { words = (await answer.json()).error; } catch {}
  throw new Error(words);
}
let inLanguage = words => words; // what ppldm says, in the language of a page that has one
function say(error) {
  field("error").className = error ? "bad" : "";
  field("error").textContent = !error ? "" : inLanguage(error instanceof TypeError
    ? "ppldm does not answer; is it still running?" : error.message);
}
const trying = action => async (...words) => {
  try { await action(...words); return true; } catch (error) { say(error); return false; }
};
field("ask").addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem("token", field("token").value.trim());
  field("ask").hidden = true;
  say();
  refresh();
});
