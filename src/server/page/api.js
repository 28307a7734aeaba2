// The server, as the page sees it. All addresses are relative, so that the page works behind a path prefix.

// What to tell the person, in one line. status 0: no server answered.
export class Trouble extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

function headers(key, more = {}) {
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function reach(url, options) {
  try {
    return await fetch(url, { cache: 'no-store', ...options });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Trouble('The server cannot be reached.');
  }
}

async function troubleOf(reply) {
  let message = '';
  try {
    const body = await reply.json();
    message = body?.error?.message ?? body?.message ?? '';
  } catch { /* not JSON: the status has to do */ }
  if (reply.status === 401) message = 'The server wants an API key: enter it in Settings.';
  return new Trouble(String(message || `The server answered ${reply.status} ${reply.statusText}`.trim()), reply.status);
}

export async function getJson(url, key, timeout = 5000) {
  const reply = await reach(url, { headers: headers(key), signal: AbortSignal.timeout(timeout) });
  if (!reply.ok) throw await troubleOf(reply);
  try {
    return await reply.json();
  } catch {
    throw new Trouble(`${url}: not JSON`, reply.status);
  }
}

export async function isHealthy() {
  try {
    return (await fetch('health', { cache: 'no-store', signal: AbortSignal.timeout(3000) })).ok;
  } catch {
    return false;
  }
}

// The data of each server-sent event.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '', data = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r\n|\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line === '') {
        if (data.length) yield data.join('\n');
        data = [];
      } else if (line.startsWith('data:')) {
        data.push(line.slice(line[5] === ' ' ? 6 : 5));
      }
    }
  }
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Trouble('The server sent an event that is not JSON.', 200);
  }
}

// Streams one answer. on_chunk gets every chunk as OpenAI's API has it. Ends normally only when the server said
// that the answer ended; throws Trouble or AbortError otherwise.
export async function streamAnswer({ request, key, signal, onChunk }) {
  const reply = await reach('v1/chat/completions', {
    method: 'POST',
    signal,
    headers: headers(key, { 'Content-Type': 'application/json' }),
    body: JSON.stringify(request),
  });
  if (!reply.ok) throw await troubleOf(reply);
  let ended = false;
  try {
    for await (const data of events(reply.body)) {
      if (data === '[DONE]') return;
      const chunk = parse(data);
      if (chunk.error) throw new Trouble(String(chunk.error.message ?? chunk.error), 500);
      if (chunk.choices?.[0]?.finish_reason) ended = true;
      onChunk(chunk);
    }
  } catch (error) {
    if (error instanceof Trouble || error.name === 'AbortError') throw error;
    throw new Trouble('The connection broke in the middle of the answer.');
  }
  if (!ended) throw new Trouble('The connection closed before the answer ended.');
}
