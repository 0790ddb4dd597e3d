// Calls to the server, with the key of this tab if there is one.

const KEY = "openrl-key";
const ROOT = "../api/v1/openrl/";

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

export class Refused extends Error {
  constructor(status, text) { super(text); this.status = status; }
}

export function open(path, options = {}) {
  const headers = { Accept: "application/json", ...options.headers };
  if (key.get()) headers["X-API-Key"] = key.get();
  return fetch(ROOT + path, { ...options, headers, cache: "no-store", credentials: "omit" });
}

export async function call(method, path, body) {
  const options = { method };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers = { "Content-Type": "application/json" };
  }
  const response = await open(path, options);
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new Refused(response.status, answer.detail ?? `${response.status} ${response.statusText}`);
  return answer;
}
