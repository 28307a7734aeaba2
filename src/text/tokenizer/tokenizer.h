// Text to token ids and back, as the model was trained: byte-pair encoding from tokenizer.json, from a
// tiktoken file, from SentencePiece's tokenizer.model or from the arrays of a GGUF file. The references are
// PyPI's tokenizers and sentencepiece; ids are equal to theirs.
// It does not know chat templates, stop strings or which token ends a turn.
#pragma once
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text/tokenizer/added_tokens.h"
#include "text/tokenizer/bpe.h"
#include "text/tokenizer/pretokenizer.h"

namespace kt::inline texts {

enum class SpecialText {
  kRecognise,  // "<|im_end|>" in the text is the token
  kAsText,     // ... is ten characters; for text that comes from users. Other added tokens are recognised.
};
struct EncodeOptions {
  SpecialText special = SpecialText::kRecognise;
  // A character that is no text: it is left out, and an added token that is spelled with it inside is not that token
  // but the characters of its spelling. Empty: none. It must be in no added token.
  std::string_view mark = {};
  bool add_special = false;  // put the tokens of the post-processor (begin of text, ...) around
};
enum class SpecialTokens { kSkip, kKeep };

// How tokens become text again.
struct Decoding {
  bool byte_level = false;                                             // a token's characters stand for bytes
  bool byte_fallback = false;                                          // "<0x0A>" is that byte
  std::vector<std::pair<std::string, std::string>> replacements = {};  // within each token, in order
  std::string drop_in_first = {};  // a character left out of the first token (Metaspace)
  std::string strip_left = {};     // a character that is removed at the start of the text ...
  uint32_t strip_count = 0;        // ... up to so many times
};

// What the readers of the sources produce. `merges` name ids of `tokens`.
struct TokenizerParts {
  std::string name = {};                                // of the file, for errors
  std::vector<std::optional<std::string>> tokens = {};  // by id, in the alphabet of the file
  std::vector<Merge> merges = {};
  std::vector<uint32_t> ranks = {};  // as in BpeParts, instead of merges; as many as tokens
  std::vector<TokenId> unused = {};  // as in BpeParts
  BpeOptions bpe = {};
  std::vector<AddedToken> added = {};
  std::vector<NormalStep> normal_steps = {};
  std::vector<WordStep> word_steps = {};
  std::vector<TokenId> prefix = {}, suffix = {};  // what add_special puts around
  Decoding decoding = {};
};

// A vocabulary as GGUF files hold it (tokenizer.ggml.*).
struct GgufVocabulary {
  std::string name = {};                     // of the file, for errors
  std::string model = {};                    // tokenizer.ggml.model: "gpt2", "llama" or "gemma4"
  std::string pre = {};                      // tokenizer.ggml.pre; empty: "default"
  std::span<const std::string> tokens = {};  // by id
  std::span<const std::string> merges = {};  // "left right"; not of "llama"
  std::span<const float> scores = {};        // of "llama"
  std::span<const int32_t> types =
      {};  // 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte; or empty
  std::optional<TokenId> add_bos = {}, add_eos = {};  // put around by add_special
  std::optional<TokenId> unknown = {};                // for what is no token; not of byte-level ones
  bool add_prefix = true, collapse_spaces = false;    // of "llama", as in PieceVocabulary
};

// The name of its splits in named_splits.cc.
std::string_view split_name(const GgufVocabulary& vocabulary);

// The ranks file of tiktoken, with what it does not say.
struct TiktokenRanks {
  std::string name = {};             // of the file, for errors
  std::string_view characters = {};  // lines "base64 rank"
  std::string_view pattern = {};     // in Rust's dialect
  std::vector<AddedToken> added = {};
  // So many ids behind the ranks are special tokens: <|reserved_token_ID|> where `added` has none of that id.
  size_t reserved = 0;
};

// What the configuration beside a tokenizer.model says.
struct SentencePieceExtras {
  std::vector<AddedToken> added = {};  // beside its own control pieces
  bool add_bos = true, add_eos = false;
};

// Immutable and move-only; any number of threads may use it.
class Tokenizer {
 public:
  // Each is ready, or Error(kInput) in one line that begins with the name of the file.
  static Tokenizer from_file(const std::string& path);  // a tokenizer.json
  static Tokenizer from_json(std::string_view characters, std::string_view name);
  static Tokenizer from_tiktoken(const TiktokenRanks& ranks);
  static Tokenizer from_gguf(const GgufVocabulary& vocabulary);
  static Tokenizer from_sentencepiece(std::string_view bytes, std::string_view name,
                                      const SentencePieceExtras& extras = {});  // a tokenizer.model
  explicit Tokenizer(TokenizerParts parts);
  Tokenizer(Tokenizer&&) = default;
  Tokenizer& operator=(Tokenizer&&) = default;

  // Invalid UTF-8 in the text counts as U+FFFD, as if read by Python's errors="replace".
  std::vector<TokenId> encode(std::string_view text, EncodeOptions options = {}) const;
  // Bytes that are no UTF-8 become U+FFFD. Error(kInput) for an id outside [0, size()); an id between without
  // a token is no text.
  std::string decode(std::span<const TokenId> ids, SpecialTokens special = SpecialTokens::kSkip) const;

  // One more than the highest id. A model's vocabulary may be padded beyond.
  size_t size() const { return tokens_.size(); }
  // The bytes a token stands for in the middle of a text; may be part of a character. Empty: no such token.
  std::string_view token_bytes(TokenId id) const;
  // As the file spells it ("Ġthe"); nullopt: no such token.
  std::optional<std::string_view> token_of(TokenId id) const;
  std::optional<TokenId> id_of(std::string_view token) const;
  bool is_special(TokenId id) const;
  std::span<const AddedToken> added_tokens() const { return added_; }
  const Decoding& decoding() const { return decoding_; }
  // For byte_fallback: the byte that the token spells, "<0x0A>".
  std::optional<uint8_t> byte_of(TokenId id) const;

 private:
  struct Token {
    std::string spelled, bytes;
    bool exists = false, special = false;
  };
  void index_tokens(TokenizerParts& parts);
  void index_added(TextBudget& budget);
  std::string bytes_of(const std::string& spelled, TextBudget& budget) const;

  std::vector<Token> tokens_;                          // by id
  std::unordered_map<std::string_view, TokenId> ids_;  // views of tokens_[..].spelled
  std::vector<AddedToken> added_;
  AddedTokenTrie raw_added_, normal_added_;  // looked for before and after normalisation
  std::vector<NormalStep> normal_steps_;
  std::vector<WordStep> word_steps_;
  Bpe bpe_;
  std::vector<TokenId> prefix_, suffix_;
  Decoding decoding_;
};

// The characters by which byte-level files spell bytes: printable Latin-1 for itself, the others from U+0100
// on.
std::string spell_bytes(std::string_view bytes);
// The way back; nullopt when a character stands for no byte.
std::optional<std::string> unspell_bytes(std::string_view spelled);
// The byte of a token that is spelled "<0x0A>".
std::optional<uint8_t> spelled_byte(std::string_view token);

}  // namespace kt::inline texts
