// `/#token=…` logs in by itself, and leaves no trace of the token in the address bar or the history.

import { logIn } from "./hub.js";

const MARK = "#token=";

export async function logInFromFragment() {
  if (!location.hash.startsWith(MARK)) return false;
  const token = location.hash.slice(MARK.length);
  history.replaceState(null, "", location.pathname + location.search);
  await logIn(token);
  location.reload();
  return true;
}

async function start(form) {
  try {
    await logInFromFragment();
  } catch (error) {
    document.getElementById("problem").textContent = error.message;
  }
  form.action = `login${location.hash}`; // whoever followed a link to a section arrives there
}

const form = document.querySelector("form[action=login]");
if (form) start(form);
