// Asks the hub. The token is in a cookie that scripts cannot read.

const PATIENCE = 10_000;

export class Unreachable extends Error {}

export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

async function ask(address, options) {
  let answer;
  try {
    answer = await fetch(address, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE), ...options });
  } catch {
    throw new Unreachable("The hub cannot be reached.");
  }
  const body = answer.status === 204 ? {} : await answer.json().catch(() => null);
  if (!answer.ok) throw new Refused(answer.status, body?.detail ?? `status ${answer.status}`);
  if (body === null) throw new Unreachable("The hub's answer broke off.");
  return body;
}

export function get(...parts) {
  return ask(`v1/${parts.map(encodeURIComponent).join("/")}`, {});
}

export function getExperts(family, limit, state) {
  const query = new URLSearchParams(state ? { limit, state } : { limit });
  return ask(`v1/families/${encodeURIComponent(family)}/experts?${query}`, {});
}

function post(address, body) {
  // The header proves to the hub that the request comes from its own page.
  const headers = { "Content-Type": "application/json", "X-Mergetta-Dashboard": "1" };
  return ask(address, { method: "POST", headers, body: JSON.stringify(body) });
}

export function decide(expert, state, reason) {
  return post(`v1/experts/${encodeURIComponent(expert)}/state`, { state, reason: reason.slice(0, 500) });
}

export function approve(token) {
  return post(`v1/tokens/${encodeURIComponent(token)}/approval`, {});
}

export function logIn(token) {
  return post("login", { token });
}
