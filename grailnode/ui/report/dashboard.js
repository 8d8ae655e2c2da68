// Keeps the page as new as its server: sections by asking for news, ages by the second, rollouts by the filter.
"use strict";
const byId = (id) => document.getElementById(id);
const form = byId("filter");
let ahead = 0; // seconds by which the server's clock is ahead of this one
let rollouts = Number(form.dataset.rollouts); // the number of what the list shows
let requests = 0;

function words(seconds) {
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const place = Math.max(0, units.findIndex(([size]) => seconds >= size));
  const [size, name] = seconds < 1 ? [1, "s"] : units[place];
  const [less, lesser] = units[place + 1] || [];
  const rest = less && seconds >= 60 ? Math.floor((seconds % size) / less) : 0;
  return `${Math.floor(seconds / size)} ${name}${rest ? ` ${rest} ${lesser}` : ""}`;
}

function tick() {
  const now = Date.now() / 1000 + ahead;
  for (const item of document.querySelectorAll("time[data-at]")) {
    item.title ||= item.textContent;
    const at = Number(item.dataset.at);
    const text = at > now ? `in ${words(at - now)}` : `${words(now - at)} ago`;
    if (item.textContent !== text) item.textContent = text;
  }
}

function replace(id, html) {
  const box = byId(id);
  const places = [...box.querySelectorAll(".scroll")].map((item) => [item.scrollLeft, item.scrollTop]);
  box.innerHTML = html; // the server has escaped every text in it
  if (id === "plots") drawPlots();
  box.querySelectorAll(".scroll").forEach((item, place) => item.scrollTo(...(places[place] || [0, 0])));
}

async function list() {
  const query = new URLSearchParams(new FormData(form));
  const request = ++requests;
  const answer = await fetch(`rollouts?${query}`);
  const html = await answer.text();
  if (answer.ok && request === requests) replace("rollouts", html); // no answer to an older request
  return query;
}

form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", async () => history.replaceState(null, "", `?${await list()}`));

let revision = form.dataset.revision;
let failures = 0;

async function look() {
  let news = null;
  try {
    news = await (await fetch(`news?since=${revision}`, { signal: AbortSignal.timeout(10000) })).json();
  } catch {
    failures += 1;
  }
  setTimeout(look, 2000);
  if (news) {
    failures = 0;
    revision = news.revision;
    const difference = news.now - Date.now() / 1000; // the server's seconds are whole
    if (Math.abs(difference - ahead) > 1) ahead = difference;
    for (const [id, html] of Object.entries(news.sections)) replace(id, html);
    const reading = byId("rollouts").querySelector("details[open]"); // is not taken away from whoever reads it
    if (news.rollouts !== rollouts && !reading) {
      rollouts = news.rollouts;
      list();
    }
    tick();
  }
  byId("link").hidden = failures < 3;
}

look();
setInterval(tick, 1000);
tick();
