// The page: puts the conversation, the list of conversations, the settings and the live figures together.
import { announce, count, find, h, setText, toast } from './dom.js';
import { Trouble, getJson, streamAnswer } from './api.js';
import { ChatList, exportAll, titleOf } from './chats.js';
import { Live } from './live.js';
import { Settings } from './settings.js';
import { Incoming, Thread } from './thread.js';
import * as store from './store.js';

const STARTERS = ['Tell me a story about a fox', 'Tell me a story about a girl who finds a key in the snow',
  'Why do only a few experts work on each token?', 'Write a haiku about memory bandwidth'];
const SAVE_MS = 1500;

const prompt = find('prompt');
let chat = store.newChat();
let running = null;  // {abort, chat} while an answer comes
let model = '';
let storageTold = false;

// --- answering

// What the model is sent: what people see, without thinking, errors and empty answers. Questions that got no answer
// become one with the next: many templates refuse two in a row.
function history(messages) {
  const turns = [];
  for (const { role, content } of messages) {
    const last = turns[turns.length - 1];
    if (role === 'user' && last?.role === 'user') last.content += `\n\n${content}`;
    else if (role === 'user' || content) turns.push({ role, content });
  }
  return turns;
}

async function modelName() {
  if (!model) {
    try {
      showModel(String((await getJson('v1/models', settings.values.key)).data?.[0]?.id ?? ''));
    } catch { /* the request itself will say what is wrong */ }
  }
  return model || 'default';
}

function showModel(name) {
  if (name === model) return;
  model = name;
  setText(find('model'), name);
  title();
}

function title() {
  const parts = [chat.messages.length ? titleOf(chat) : '', model, 'KT'];
  document.title = parts.filter(Boolean).join(' · ');
}

function setRunning(value) {
  running = value;
  find('send').hidden = Boolean(value);
  find('stop').hidden = !value;
  document.body.classList.toggle('answering', Boolean(value));
  live.poll();
}

// Streams an answer to the messages so far, into the conversation that is open now, even if another one is opened
// meanwhile.
async function answer() {
  const mine = chat, message = { role: 'assistant', content: '' }, abort = new AbortController();
  const messages = history(mine.messages.slice(mine.skip));
  mine.messages.push(message);
  const incoming = new Incoming(message, thread.add(message));
  setRunning({ abort, chat: mine });
  thread.follow();
  let saved = performance.now();
  const onChunk = (chunk) => {
    incoming.take(chunk);
    if (performance.now() - saved > SAVE_MS) { saved = performance.now(); save(mine); }
  };
  try {
    const request = settings.request(await modelName(), messages);
    await streamAnswer({ request, key: settings.values.key, signal: abort.signal, onChunk });
  } catch (error) {
    if (error.name === 'AbortError') message.note = 'stopped';
    else message.error = error instanceof Trouble ? error.message : 'The page could not read the answer.';
    if (error instanceof Trouble) message.status = error.status;
    if (message.status === 0) live.poll();
    if (!(error instanceof Trouble) && error.name !== 'AbortError') console.error(error);
  }
  incoming.finish();
  mine.updated = Date.now();
  save(mine);
  setRunning(null);
  announce(
    message.error ? `Error: ${message.error}` : `Answer: ${incoming.view.body.innerText.slice(0, 1500) || 'empty'}`);
}

function save(one) {
  if (one.deleted) return;
  store.saveChat(one);
  list.draw();
  title();
}

function ask(text) {
  if (running || !text.trim()) return;
  if (!chat.messages.length) chat.title = text.trim().split('\n')[0].slice(0, 60);
  const message = { role: 'user', content: text };
  chat.messages.push(message);
  chat.updated = Date.now();
  thread.add(message);
  save(chat);
  drawEmpty();
  answer();
}

const stop = () => running?.abort.abort();

// Forgets `message` and all that follows it; false if it is not there.
function cutAt(message) {
  const at = chat.messages.indexOf(message);
  if (at < 0 || running) return false;
  chat.messages.length = at;
  if (at < chat.skip) chat.skip = 0;
  thread.show(chat);
  return true;
}

// Where the newer half of what is sent begins, or 0 if there is only one question.
function newerHalf() {
  const questions = chat.messages.flatMap(({ role }, k) => (role === 'user' && k >= chat.skip ? [k] : []));
  return questions.length > 1 ? questions[Math.ceil(questions.length / 2)] : 0;
}

const actions = {
  canForget: () => newerHalf() > 0,
  // A conversation that no longer fits: go on with its newer half.
  forget: (message) => {
    const skip = newerHalf();
    if (running || !chat.messages.includes(message)) return;
    chat.skip = skip;
    cutAt(message);
    answer();
  },
  retry: (message) => { if (cutAt(message)) answer(); },
  regenerate: (message) => { if (cutAt(message)) answer(); },
  edit: (message, text) => { if (cutAt(message)) ask(text); },
};

// --- conversations

function openChat(next) {
  if (running) stop();
  chat = next;
  thread.show(chat);
  drawEmpty();
  list.draw();
  title();
  try { sessionStorage.setItem('kt.open', chat.id); } catch { /* the next load opens the newest */ }
}

function startChat() {
  openChat(store.newChat());
  closeDrawers();
  prompt.focus();
}

function drawEmpty() {
  find('empty').hidden = chat.messages.length > 0;
  find('thread').hidden = chat.messages.length === 0;
}

function firstChat() {
  let id = null;
  try { id = sessionStorage.getItem('kt.open'); } catch { /* none */ }
  const known = store.listChats();
  if (id && known.some((one) => one.id === id)) return store.loadChat(id);
  return null;
}

// --- drawers: the side columns of a wide page slide over a narrow one

const roomFor = { chats: matchMedia('(min-width: 1200px)'), live: matchMedia('(min-width: 860px)') };
const opened = { chats: true, live: true };  // as columns

function isOpen(side) {
  return roomFor[side].matches ? opened[side] : document.body.dataset.drawer === side;
}

function drawSides() {
  for (const side of ['chats', 'live']) {
    const open = isOpen(side);
    document.body.classList.toggle(`no-${side}`, !open);
    find(side).inert = !open;
    find(`toggle-${side}`).setAttribute('aria-expanded', String(open));
  }
  const over = ['chats', 'live'].some((side) => !roomFor[side].matches && isOpen(side));
  find('scrim').hidden = !over;
  find('main').inert = over;
}

function toggleSide(side) {
  if (roomFor[side].matches) {
    opened[side] = !opened[side];
    drawSides();
    return;
  }
  const open = !isOpen(side);
  if (open) document.body.dataset.drawer = side;
  else delete document.body.dataset.drawer;
  drawSides();
  if (open) find(side).querySelector('.drawer-close').focus();
  else find(`toggle-${side}`).focus();
  live.poll();
}

function closeDrawers() {
  if (find('scrim').hidden) return;
  toggleSide(document.body.dataset.drawer);
}

// --- wiring

function grow() {
  prompt.style.height = 'auto';
  prompt.style.height = `${prompt.scrollHeight}px`;
  find('send').disabled = !prompt.value.trim();
}

function sendPrompt() {
  if (running || !prompt.value.trim()) return;
  const text = prompt.value;
  prompt.value = '';
  grow();
  ask(text);
}

function onStatus(status) {
  if (typeof status.model === 'string' && status.model) showModel(status.model);
  const facts = [status.experts_format && `${status.experts_format} experts`, status.isa && `on ${status.isa}`,
    status.threads && `with ${status.threads} threads`].filter(Boolean).join(' ');
  const room = status.context ? `${count(status.context)} tokens of context` : '';
  setText(find('empty-facts'), [facts, room].filter(Boolean).join(', '));
}

function wire() {
  find('composer').addEventListener('submit', (event) => { event.preventDefault(); sendPrompt(); });
  prompt.addEventListener('input', grow);
  prompt.addEventListener('keydown', (event) => {
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    sendPrompt();
  });
  find('stop').addEventListener('click', () => { stop(); prompt.focus(); });
  document.addEventListener('keydown', (event) => {
    if (event.key !== 'Escape' || document.querySelector('dialog[open]')) return;
    if (!find('scrim').hidden) closeDrawers();
    else if (running) stop();
  });
  find('new-chat').addEventListener('click', startChat);
  find('export-all').addEventListener('click', exportAll);
  find('scrim').addEventListener('click', closeDrawers);
  for (const button of document.querySelectorAll('.drawer-close')) button.addEventListener('click', closeDrawers);
  for (const side of ['chats', 'live']) {
    find(`toggle-${side}`).addEventListener('click', () => toggleSide(side));
    roomFor[side].addEventListener('change', () => { delete document.body.dataset.drawer; drawSides(); });
  }
  addEventListener('pagehide', () => { if (running) save(running.chat); });
  find('starters').append(...STARTERS.map((text) => h('button', { type: 'button', onclick: () => ask(text) }, text)));
}

store.onStorageTrouble(() => {
  if (storageTold) return;
  storageTold = true;
  toast('This browser’s storage is full or off: conversations last until the page is closed.');
});
const settings = new Settings(() => live.poll());
const thread = new Thread({ root: find('thread'), scroller: find('scroller'), toEnd: find('to-end'), actions });
const list = new ChatList({
  current: () => chat.id,
  open: (id) => {
    const next = id === chat.id ? chat : store.loadChat(id);
    if (next && next !== chat) openChat(next);
    closeDrawers();
  },
  removed: (id) => {
    if (id !== chat.id) return;
    chat.deleted = true;
    openChat(store.newChat());
  },
  renamed: (id, name) => { if (id === chat.id) { chat.title = name; title(); } },
});
const live =
  new Live({ key: () => settings.values.key, answering: () => running !== null, onStatus, onBack: () => {} });
wire();
drawSides();
openChat(firstChat() ?? chat);
grow();
document.body.classList.add('ready');
if (roomFor.live.matches) prompt.focus();
