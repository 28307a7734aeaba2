// The list of conversations: choose, rename, export, delete (with a way back).
import { find, h, iconButton, toast } from './dom.js';
import * as store from './store.js';

export const titleOf = (chat) => chat.title.trim() || 'Untitled';

export function saveFile(name, value) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(value, null, 2)], { type: 'application/json' }));
  const anchor = h('a', { href: url, download: name });
  document.body.append(anchor);
  anchor.click();
  anchor.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

const fileName = (title) =>
  (title.replace(/[^\p{L}\p{N}]+/gu, '-').replace(/^-+|-+$/g, '').slice(0, 60) || 'conversation') + '.json';

export const exportAll = () =>
  saveFile('kt-conversations.json', store.listChats().map(({ id }) => store.loadChat(id)).filter(Boolean));

// hooks: {open(id), current(), removed(id), renamed(id, title)}
export class ChatList {
  constructor(hooks) {
    this.hooks = hooks;
    this.root = find('chat-list');
    store.onListChange(() => this.draw());
    this.draw();
  }

  // Draws only what changed, and never under somebody who types a title: focus would be lost.
  draw() {
    const current = this.hooks.current(), chats = store.listChats();
    const key = JSON.stringify([current, chats.map(({ id, title }) => [id, title])]);
    if (key === this.drawn || this.renaming) return;
    this.drawn = key;
    const rows = chats.map((chat) => this.#row(chat, chat.id === current));
    this.root.replaceChildren(...(rows.length ? rows : [h('li', { class: 'no-chats' }, 'Nothing yet.')]));
  }

  #row(chat, active) {
    const title = titleOf(chat);
    const open = h('button', { class: 'chat-open', type: 'button', title, 'aria-current': active ? 'true' : undefined,
      onclick: () => this.hooks.open(chat.id) }, title);
    const row = h('li', { class: active ? 'active' : '', 'data-id': chat.id }, open, h('span', { class: 'chat-tools' },
      iconButton('edit', `Rename ${title}`, () => this.#rename(chat, row)),
      iconButton('export', `Export ${title}`, () => this.#export(chat.id)),
      iconButton('delete', `Delete ${title}`, () => this.#delete(chat))));
    return row;
  }

  #rename(chat, row) {
    const input = h('input', { class: 'chat-rename', 'aria-label': 'Title', maxlength: '120' });
    input.value = chat.title;
    let over = false;
    const end = (keep) => {
      if (over) return;
      over = true;
      this.renaming = false;
      const title = input.value.trim(), whole = store.loadChat(chat.id);
      if (keep && title && whole) {
        store.saveChat({ ...whole, title });
        this.hooks.renamed(chat.id, title);
      }
      this.drawn = '';
      this.draw();
      this.#focus(chat.id);
    };
    input.addEventListener('keydown', (event) => {
      if (event.isComposing) return;
      if (event.key === 'Enter') { event.preventDefault(); end(true); }
      if (event.key === 'Escape') { event.stopPropagation(); end(false); }
    });
    input.addEventListener('blur', () => end(true));
    this.renaming = true;
    row.replaceChildren(input);
    input.focus();
    input.select();
  }

  // The conversation's own button, or the nearest thing to it.
  #focus(id) {
    const rows = [...this.root.querySelectorAll('li')];
    (rows.find((row) => row.dataset.id === id)?.querySelector('.chat-open') ?? find('new-chat')).focus();
  }

  #export(id) {
    const chat = store.loadChat(id);
    if (chat) saveFile(fileName(titleOf(chat)), chat);
  }

  #delete(chat) {
    const whole = store.loadChat(chat.id);
    store.deleteChat(chat.id);
    this.hooks.removed(chat.id);
    this.draw();
    this.#focus(null);
    const undo = () => { if (whole) store.saveChat(whole); this.draw(); };
    toast(`Deleted “${titleOf(chat).slice(0, 40)}”.`, 'Undo', undo);
  }
}
