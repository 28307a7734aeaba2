// Light colouring of code, line by line, so that code that still streams costs one line at a time. Unknown
// languages stay plain. Makes text nodes and spans with a class; never HTML.

const words = (text) => new Set(text.split(' '));

const C_WORDS = 'if else for while do switch case default break continue return struct enum union const static ' +
  'void int char float double long short unsigned signed bool true false sizeof typedef extern inline';
const LANGUAGES = {
  c: { line: '//', block: true, words: words(C_WORDS + ' auto class namespace template typename using public private ' +
    'protected virtual override new delete nullptr try catch throw noexcept constexpr consteval explicit operator ' +
    'concept requires this co_await size_t include define ifdef ifndef endif pragma') },
  rust: { line: '//', block: true, words: words('fn let mut pub struct enum impl trait for in if else match while ' +
    'loop return use mod crate self Self super const static ref move async await unsafe where as dyn ' +
    'true false Some None Ok Err') },
  go: { line: '//', block: true, template: true, words: words('func var const type struct interface map chan ' +
    'package import if else for range return go defer select switch case default break continue nil true ' +
    'false make new len') },
  java: { line: '//', block: true, words: words(C_WORDS + ' class interface extends implements public private ' +
    'protected final abstract new this super import package throws throw try catch finally null var ' +
    'record boolean byte') },
  js: { line: '//', block: true, template: true, words: words('const let var function return if else for while do ' +
    'switch case default break continue new this class extends super import export from async await yield of in ' +
    'typeof instanceof try catch finally throw null undefined true false delete void interface type enum ' +
    'implements readonly as') },
  python: { line: '#', triple: true, words: words('def class return if elif else for while in not and or is None ' +
    'True False import from as with try except finally raise lambda yield async await pass break continue global ' +
    'nonlocal assert del match case self print') },
  bash: { line: '#', words: words('if then else elif fi for in do done while until case esac function return local ' +
    'export set echo cd exit source sudo') },
  json: { words: words('true false null') },
  yaml: { line: '#', words: words('true false null yes no') },
  sql: { line: '--', block: true, fold: true, words: words('select from where insert into values update set delete ' +
    'create table index view join left right inner outer on group by order having limit as and or not null is in ' +
    'like distinct union all primary key references case when then else end') },
};
const ALIASES = {
  'c++': 'c', cpp: 'c', cc: 'c', h: 'c', hpp: 'c', cuda: 'c', cs: 'java', kotlin: 'java', rs: 'rust', golang: 'go',
  javascript: 'js', jsx: 'js', ts: 'js', typescript: 'js', tsx: 'js', py: 'python', python3: 'python', toml: 'yaml',
  sh: 'bash', shell: 'bash', zsh: 'bash', console: 'bash', jsonc: 'json', yml: 'yaml',
};

export function languageOf(name) {
  const key = name.toLowerCase();
  return Object.hasOwn(LANGUAGES, key) ? LANGUAGES[key] : Object.hasOwn(ALIASES, key) ? LANGUAGES[ALIASES[key]] : null;
}

const WORD = /[A-Za-z_$][\w$]*/y, NUMBER = /(?:0[xXbB][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\w*/y;
const STRING = { '"': /"(?:[^"\\]|\\.)*"?/y, "'": /'(?:[^'\\]|\\.)*'?/y };
const LONG_LINE = 2000;

function match(pattern, line, at) {
  pattern.lastIndex = at;
  return pattern.exec(line)?.[0] ?? '';
}

// The end of what `until` closes, from `at`; and the text that is still open at the end of the line.
function runTo(line, at, until) {
  const end = line.indexOf(until, at);
  return end < 0 ? { end: line.length, open: until } : { end: end + until.length, open: '' };
}

// What begins at `at` and may go on over lines.
function longStart(language, line, at) {
  if (language.block && line.startsWith('/*', at)) return { kind: 'c', until: '*/', skip: 2 };
  if (language.template && line[at] === '`') return { kind: 's', until: '`', skip: 1 };
  if (language.triple && (line.startsWith('"""', at) || line.startsWith("'''", at))) {
    return { kind: 's', until: line.slice(at, at + 3), skip: 3 };
  }
  return null;
}

function wordKind(language, word, line, after) {
  if (language.words.has(language.fold ? word.toLowerCase() : word)) return 'k';
  return line[after] === '(' ? 'f' : '';
}

// One line as nodes. state: {kind, until} of what an earlier line left open, or null. Returns [nodes, state].
export function colourLine(language, line, state) {
  if (!language || line.length > LONG_LINE) return [[document.createTextNode(line)], null];
  const nodes = [];
  let plain = '', at = 0;
  const put = (kind, end) => {
    const text = line.slice(at, end);
    at = end;
    if (!kind) { plain += text; return; }
    if (plain) nodes.push(document.createTextNode(plain));
    plain = '';
    const span = document.createElement('span');
    span.className = `t-${kind}`;
    span.textContent = text;
    nodes.push(span);
  };
  while (at < line.length || state) {
    const start = state ? { ...state, skip: 0 } : longStart(language, line, at);
    if (start) {
      const { end, open } = runTo(line, at + start.skip, start.until);
      put(start.kind, end);
      state = open ? { kind: start.kind, until: open } : null;
      if (state) break;
      continue;
    }
    const c = line[at];
    if (language.line && line.startsWith(language.line, at)) put('c', line.length);
    else if (STRING[c]) put('s', at + match(STRING[c], line, at).length);
    else if (c >= '0' && c <= '9') put('n', at + match(NUMBER, line, at).length);
    else {
      const word = match(WORD, line, at);
      if (word) put(wordKind(language, word, line, at + word.length), at + word.length);
      else put('', at + 1);
    }
  }
  if (plain) nodes.push(document.createTextNode(plain));
  return [nodes, state];
}
