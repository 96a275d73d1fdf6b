"""What a reader with weak eyes, or no mouse, needs of a page: measured by scripts that run in it (browser.Page.run)."""

# [words, contrast] of each visible element with text of its own, by the formula of WCAG 2.2 ("contrast ratio"); what is
# half transparent is laid over what lies below it.
CONTRASTS = """
const read = text => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
const over = (top, low) => [0, 1, 2].map(i => top[i] * top[3] + low[i] * (1 - top[3]));
const light = rgb => rgb.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
function below(element) {
  if (!element) return [255, 255, 255];
  const own = read(getComputedStyle(element).backgroundColor);
  return own[3] === 1 ? own.slice(0, 3) : over(own, below(element.parentElement));
}
const opaque = one => one ? Number(getComputedStyle(one).opacity) * opaque(one.parentElement) : 1;
function contrast(element, pseudo) {
  const style = getComputedStyle(element, pseudo), own = pseudo ? read(style.backgroundColor) : [0, 0, 0, 0];
  const paper = over(own, below(element)), ink = read(style.color);
  ink[3] *= opaque(element);
  const [low, high] = [light(paper), light(over(ink, paper))].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}
const words = one => ["INPUT", "TEXTAREA", "SELECT"].includes(one.tagName) ? (one.id || one.type)
  : [...one.childNodes].filter(node => node.nodeType === 3).map(node => node.data.trim()).join(" ").trim();
const shown = [...document.body.querySelectorAll("*")].filter(one => one.getClientRects().length && !one.disabled
  && getComputedStyle(one).visibility === "visible" && !["SCRIPT", "STYLE", "OPTION"].includes(one.tagName)
  && !["checkbox", "range"].includes(one.type) && words(one));
return shown.flatMap(one => [[words(one), contrast(one)],
  ...(one.type === "file" ? [["button of " + one.id, contrast(one, "::file-selector-button")]] : [])]);
"""

# What is wider than the window, or stands out of it at the right, and does not scroll by itself.
OVERFLOWS = """
const scrolls = one => one && one !== document.documentElement
  && (/auto|scroll|hidden/.test(getComputedStyle(one).overflowX) || scrolls(one.parentElement));
const wide = [...document.body.querySelectorAll("*")].filter(one => one.getClientRects().length
  && (one.getBoundingClientRect().right > innerWidth + 0.5 || one.getBoundingClientRect().left < -0.5)
  && !scrolls(one.parentElement)).map(one => one.outerHTML.slice(0, 80));
const width = document.documentElement.scrollWidth;
return width > innerWidth ? [`the page: ${width}`, ...wide] : wide;
"""
