// What the browser keeps: settings and conversations, in localStorage. Storage may be off, full or spoilt by
// somebody else; the page then works from memory and says so once.

const LIST = 'kt.chats', CHAT = 'kt.chat.', SETTINGS = 'kt.settings';
const memory = new Map();
let onTrouble = () => {};

export function onStorageTrouble(call) { onTrouble = call; }

function read(key, fallback) {
  try {
    const text = localStorage.getItem(key) ?? memory.get(key);
    const value = text === undefined || text === null ? fallback : JSON.parse(text);
    return value === null || typeof value !== typeof fallback ? fallback : value;
  } catch {
    return fallback;
  }
}

function write(key, value) {
  const text = JSON.stringify(value);
  try {
    localStorage.setItem(key, text);
    memory.delete(key);
  } catch {
    memory.set(key, text);
    onTrouble();
  }
}

function remove(key) {
  memory.delete(key);
  try { localStorage.removeItem(key); } catch { /* nothing was kept there */ }
}

// --- settings

export const DEFAULTS = { system: '', temperature: '', top_p: '', max_tokens: '', seed: '', key: '', theme: 'auto' };

export function loadSettings() {
  const kept = read(SETTINGS, {}), settings = { ...DEFAULTS };
  for (const name of Object.keys(DEFAULTS)) if (typeof kept[name] === 'string') settings[name] = kept[name];
  return settings;
}
export const saveSettings = (settings) => write(SETTINGS, settings);

// --- conversations: {id, title, updated, skip, messages: [{role, content, ...}]}; the list has no messages. The first
// `skip` messages are shown and no longer sent.

const texts = ['content', 'reasoning', 'error', 'note', 'stats', 'first'];

// Whatever was stored, only the shape that the page draws comes out.
function tidy(message) {
  if (!message || (message.role !== 'user' && message.role !== 'assistant')) return null;
  const clean = { role: message.role, content: '' };
  for (const name of texts) if (typeof message[name] === 'string') clean[name] = message[name];
  for (const name of ['thought_s', 'status']) if (Number.isFinite(message[name])) clean[name] = message[name];
  if (Array.isArray(message.calls)) {
    clean.calls =
      message.calls.map((call) => ({ name: String(call?.name ?? ''), arguments: String(call?.arguments ?? '') }));
  }
  return clean;
}

export function listChats() {
  const list = read(LIST, []);
  if (!Array.isArray(list)) return [];
  return list.filter((chat) => chat && typeof chat.id === 'string')
    .map(({ id, title, updated }) => ({ id, title: String(title ?? ''), updated: Number(updated) || 0 }))
    .sort((a, b) => b.updated - a.updated);
}

export function newChat() {
  const id = Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
  return { id, title: '', updated: Date.now(), skip: 0, messages: [] };
}

export function loadChat(id) {
  const chat = read(CHAT + id, {});
  if (!Array.isArray(chat.messages)) return null;
  const messages = chat.messages.map(tidy).filter(Boolean);
  const skip = Math.max(0, Math.min(messages.length, Math.floor(Number(chat.skip) || 0)));
  return { id, title: String(chat.title ?? ''), updated: Number(chat.updated) || 0, skip, messages };
}

// Conversations without a message are not kept. The list is read again first: another tab may have written it.
export function saveChat(chat) {
  if (!chat.messages.length) return;
  write(CHAT + chat.id, chat);
  const { id, title, updated } = chat;
  write(LIST, [{ id, title, updated }, ...listChats().filter((other) => other.id !== id)]);
}

export function deleteChat(id) {
  remove(CHAT + id);
  write(LIST, listChats().filter((chat) => chat.id !== id));
}

// Tells when another tab changed the list.
export function onListChange(call) {
  addEventListener('storage', (event) => { if (event.key === LIST || event.key === null) call(); });
}
