// The messages of one conversation on the screen. Knows how they look, not where they come from.
import { copyText, count, h, icon, iconButton, rate, setText } from './dom.js';
import { MarkdownView } from './markdown.js';

const clock = () => performance.now();
const FRAME_MS = 33;

// The thinking part of an answer: open while it is all there is, folded once the answer begins, unless the reader
// chose otherwise.
class Thinking {
  constructor() {
    this.title = h('summary', {}, 'Thinking');
    this.body = h('div', { class: 'prose' });
    this.view = new MarkdownView(this.body);
    this.node = h('details', { class: 'thinking', hidden: true }, this.title, this.body);
    this.title.addEventListener('click', () => { this.chosen = true; });
  }

  update(message, streaming) {
    if (!message.reasoning) return;
    this.node.hidden = false;
    this.view.update(message.reasoning);
    const active = streaming && !message.content && !message.calls;
    this.node.classList.toggle('active', active);
    setText(this.title, active ? 'Thinking…'
      : message.thought_s ? `Thought for ${message.thought_s.toFixed(1)} s` : 'Thinking');
    if (!this.chosen) this.node.open = active;
  }
}

function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function callCard(call) {
  return h('div', { class: 'call' },
    h('p', { class: 'call-name' }, icon('tool'), h('span', {}, 'Calls '), h('code', {}, call.name || '…')),
    call.arguments ? h('pre', { tabindex: '0' }, h('code', {}, prettyJson(call.arguments))) : null);
}

// actions: {retry(message), regenerate(message), canForget(), forget(message), edit(message, text)}
class AnswerView {
  constructor(message, actions) {
    this.message = message;
    this.body = h('div', { class: 'prose' });
    this.markdown = new MarkdownView(this.body);
    this.thinking = new Thinking();
    this.calls = h('div', { class: 'calls' });
    this.error = h('div', { class: 'error', role: 'alert', hidden: true });
    this.stats = h('span', { class: 'stats' });
    this.first = h('span', { class: 'stats wide-only' });
    const copy = iconButton('copy', 'Copy answer', () => copyText(message.content, copy));
    this.foot = h('div', { class: 'message-foot' }, copy,
      iconButton('again', 'Answer again', () => actions.regenerate(message)), this.stats, this.first);
    this.wait = h('p', { class: 'wait', 'aria-hidden': 'true' }, h('span'), h('span'), h('span'));
    this.node = h('article', { class: 'message answer', 'aria-label': 'Answer' },
      this.thinking.node, this.body, this.calls, this.wait, this.error, this.foot);
    this.actions = actions;
  }

  update(streaming) {
    const { message } = this;
    this.node.classList.toggle('streaming', streaming);
    this.node.setAttribute('aria-busy', String(streaming));
    this.thinking.update(message, streaming);
    this.markdown.update(message.content);
    if (message.calls) this.calls.replaceChildren(...message.calls.map(callCard));
    this.wait.hidden = !streaming || Boolean(message.content || message.reasoning || message.calls);
    this.foot.hidden = streaming || Boolean(message.error && !message.content);
    setText(this.stats, [message.note, message.stats].filter(Boolean).join(' · '));
    setText(this.first, message.first ?? '');
    this.error.hidden = !message.error;
    if (message.error) {
      this.error.replaceChildren(h('span', {}, message.error),
        h('button', { type: 'button', class: 'plain', onclick: () => this.actions.retry(message) }, 'Try again'));
      if (message.status === 400 && this.actions.canForget()) {
        this.error.append(h('button', { type: 'button', class: 'plain', onclick: () => this.actions.forget(message) },
          'Leave out older messages'));
      }
    }
  }
}

class QuestionView {
  constructor(message, actions) {
    this.message = message;
    this.text = h('div', { class: 'question-text' }, message.content);
    const edit = iconButton('edit', 'Edit and send again', () => this.#edit(actions));
    const copy = iconButton('copy', 'Copy message', () => copyText(message.content, copy));
    this.foot = h('div', { class: 'message-foot' }, edit, copy);
    this.node = h('article', { class: 'message question', 'aria-label': 'You' }, this.text, this.foot);
  }

  update() {}

  #edit(actions) {
    const area = h('textarea',
      { 'aria-label': 'Edit message', rows: String(Math.min(10, this.message.content.split('\n').length + 1)) });
    area.value = this.message.content;
    const close = () => {
      form.remove();
      this.text.hidden = this.foot.hidden = false;
      this.node.classList.remove('editing');
    };
    const send = () => {
      const text = area.value.trim();
      close();
      if (text) actions.edit(this.message, text);
    };
    const form = h('form', { class: 'edit', onsubmit: (event) => { event.preventDefault(); send(); } }, area,
      h('div', { class: 'edit-foot' }, h('button', { type: 'button', class: 'plain', onclick: close }, 'Cancel'),
        h('button', { class: 'primary' }, 'Send')));
    area.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') { event.stopPropagation(); close(); }
      if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    });
    this.text.hidden = this.foot.hidden = true;
    this.node.classList.add('editing');
    this.node.append(form);
    area.focus();
  }
}

// The list of messages and where it is scrolled: it follows the answer while the reader is at the end.
export class Thread {
  constructor({ root, scroller, toEnd, actions }) {
    Object.assign(this, { root, scroller, toEnd, actions, views: [], following: true });
    scroller.addEventListener('scroll', () => this.#noteScroll(), { passive: true });
    toEnd.addEventListener('click', () => this.follow());
    new ResizeObserver(() => { if (this.following) this.#jump(); }).observe(root);
    new ResizeObserver(() => { if (this.following) this.#jump(); }).observe(scroller);
  }

  show({ messages, skip }) {
    this.views = [];
    this.root.replaceChildren();
    messages.forEach((message, k) => {
      if (skip && k === skip)
        this.root.append(h('p', { class: 'forgotten' }, 'The model no longer sees what is above.'));
      this.add(message);
    });
    this.follow();
  }

  add(message) {
    const view =
      message.role === 'user' ? new QuestionView(message, this.actions) : new AnswerView(message, this.actions);
    view.update(false);
    this.views.push(view);
    this.root.append(view.node);
    return view;
  }

  follow() {
    this.following = true;
    this.toEnd.hidden = true;
    this.#jump();
  }

  #jump() { this.scroller.scrollTop = this.scroller.scrollHeight; }

  #noteScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    this.following = scrollHeight - scrollTop - clientHeight < 60;
    this.toEnd.hidden = this.following;
  }
}

// One answer as it comes: collects chunks into its message and draws them some thirty times a second. The machine
// that draws is often the one that computes the answer.
export class Incoming {
  constructor(message, view) {
    Object.assign(this, { message, view, began: clock(), first: 0, last: 0, pieces: 0, usage: null, timer: 0 });
    view.update(true);
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { message } = this, delta = choice.delta ?? choice.message ?? {};
    if (delta.reasoning_content) message.reasoning = (message.reasoning ?? '') + delta.reasoning_content;
    if ((delta.content || delta.tool_calls) && message.reasoning && !message.thought_s) {
      message.thought_s = (clock() - this.began) / 1000;
    }
    if (delta.content) message.content += delta.content;
    for (const call of delta.tool_calls ?? []) this.#call(call);
    if (choice.finish_reason === 'length') message.note = 'stopped at the token limit';
    if (delta.content || delta.reasoning_content || delta.tool_calls) {
      this.last = clock();
      this.first ||= this.last;
      ++this.pieces;
    }
    this.timer ||= setTimeout(() => { this.timer = 0; this.view.update(true); }, FRAME_MS);
  }

  #call(call) {
    const calls = (this.message.calls ??= []),
          index = Number.isInteger(call.index) && call.index < 256 ? call.index : 0;
    while (calls.length <= index) calls.push({ name: '', arguments: '' });
    calls[index].name += call.function?.name ?? '';
    calls[index].arguments += call.function?.arguments ?? '';
  }

  finish() {
    clearTimeout(this.timer);
    const tokens = this.usage?.completion_tokens ?? this.pieces;
    const seconds = (this.last - this.first) / 1000, wait = (this.first - this.began) / 1000;
    if (this.first) {
      const speed = tokens > 1 && seconds > 0 ? [`${rate((tokens - 1) / seconds)} tokens/s`] : [];
      this.message.stats = [`${count(tokens)} ${tokens === 1 ? 'token' : 'tokens'}`, ...speed].join(' · ');
      this.message.first = `first after ${wait.toFixed(2)} s`;
    }
    this.view.update(false);
  }
}
