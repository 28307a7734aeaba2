// The settings dialog, and what its values mean for a request. Empty fields are left to the server.
import { find } from './dom.js';
import { DEFAULTS, loadSettings, saveSettings } from './store.js';

export class Settings {
  constructor(onChange) {
    this.values = loadSettings();
    this.dialog = find('settings');
    this.form = this.dialog.querySelector('form');
    this.form.addEventListener('input', () => this.#read());
    this.form.addEventListener('change', () => onChange());
    this.dialog.addEventListener('click', (event) => { if (event.target === this.dialog) this.dialog.close(); });
    find('open-settings').addEventListener('click', () => this.open());
    find('reset-settings').addEventListener('click', () => {
      this.values = { ...DEFAULTS };
      saveSettings(this.values);
      this.#write();
      onChange();
    });
    this.#write();
  }

  open() { this.dialog.showModal(); }

  #read() {
    for (const name of Object.keys(DEFAULTS)) {
      const field = this.form.elements[name];
      this.values[name] = field.validity && !field.validity.valid ? '' : field.value;
    }
    saveSettings(this.values);
    this.#theme();
  }

  #write() {
    for (const name of Object.keys(DEFAULTS)) this.form.elements[name].value = this.values[name];
    this.#theme();
  }

  #theme() {
    const { theme } = this.values;
    if (theme === 'light' || theme === 'dark') document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    dispatchEvent(new Event('themechange'));
  }

  // The fields of a chat request.
  request(model, messages) {
    const { system } = this.values, request = { model, stream: true, stream_options: { include_usage: true } };
    request.messages = system.trim() ? [{ role: 'system', content: system }, ...messages] : messages;
    for (const name of ['temperature', 'top_p', 'max_tokens', 'seed']) {
      const value = Number(this.values[name]);
      if (this.values[name] !== '' && Number.isFinite(value)) request[name] = value;
    }
    return request;
  }
}
