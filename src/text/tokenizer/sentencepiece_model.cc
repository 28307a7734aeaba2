#include "text/tokenizer/sentencepiece_model.h"

#include <algorithm>
#include <bit>

#include "base/error.h"

namespace kt::inline texts {
namespace {

constexpr size_t kMostPieces = size_t{1} << 20;

// One message's fields in order. Groups, which nothing has written for decades, are errors.
class Message {
 public:
  struct Field {
    uint64_t number = 0;
    uint64_t value = 0;           // of a varint, or of a fixed one's bits
    std::string_view bytes = {};  // of a string or a message
    enum class Kind : uint8_t { kVarint, kFixed64, kBytes, kFixed32 = 5 } kind = Kind::kVarint;
  };

  Message(std::string_view bytes, const std::string& name) : rest_(bytes), name_(name) {}

  std::optional<Field> next() {
    if (rest_.empty()) return std::nullopt;
    Field field;
    const uint64_t key = varint();
    field.number = key >> 3;
    field.kind = static_cast<Field::Kind>(key & 7);
    switch (field.kind) {
      case Field::Kind::kVarint:
        field.value = varint();
        break;
      case Field::Kind::kFixed64:
        field.value = fixed(8);
        break;
      case Field::Kind::kFixed32:
        field.value = fixed(4);
        break;
      case Field::Kind::kBytes:
        field.bytes = take(varint());
        break;
      default:
        bad();
    }
    if (field.number == 0) bad();
    return field;
  }

  [[noreturn]] void bad() const {
    fail("{}: not a tokenizer.model of SentencePiece, or cut off: {} bytes before the end of a message",
         name_, rest_.size());
  }

 private:
  std::string_view take(uint64_t count) {
    if (count > rest_.size()) bad();
    const std::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return taken;
  }
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 70; shift += 7) {
      const auto byte = static_cast<uint8_t>(take(1)[0]);
      if (shift < 64) value |= uint64_t{byte & 0x7Fu} << shift;
      if (byte < 0x80) return value;
    }
    bad();
  }
  uint64_t fixed(size_t count) {
    uint64_t value = 0;
    const std::string_view bytes = take(count);
    for (size_t i = count; i > 0; --i) value = value << 8 | static_cast<uint8_t>(bytes[i - 1]);
    return value;
  }

  std::string_view rest_;
  const std::string& name_;
};

using FieldKind = Message::Field::Kind;

// The checks of a field's kind, which the message's definition fixes.
bool flag_in(const Message& message, const Message::Field& field) {
  if (field.kind != FieldKind::kVarint) message.bad();
  return field.value != 0;
}
int32_t number_in(const Message& message, const Message::Field& field) {
  if (field.kind != FieldKind::kVarint) message.bad();
  return static_cast<int32_t>(static_cast<uint32_t>(field.value));
}
std::string_view bytes_in(const Message& message, const Message::Field& field) {
  if (field.kind != FieldKind::kBytes) message.bad();
  return field.bytes;
}

void read_piece_fields(std::string_view bytes, SentencePieceModel& model) {
  if (model.pieces.size() == kMostPieces) fail("{}: more than {} pieces", model.name, kMostPieces);
  std::string_view piece;
  float score = 0;
  int32_t type = 1;
  Message message(bytes, model.name);
  while (const auto field = message.next()) {
    if (field->number == 1) piece = bytes_in(message, *field);
    if (field->number == 2) {
      if (field->kind != FieldKind::kFixed32) message.bad();
      score = std::bit_cast<float>(static_cast<uint32_t>(field->value));
    }
    if (field->number == 3) type = number_in(message, *field);
  }
  if (piece.empty()) fail("{}: piece {} is empty", model.name, model.pieces.size());
  model.pieces.emplace_back(piece);
  model.scores.push_back(score);
  model.types.push_back(type);
}

void read_trainer_spec(std::string_view bytes, SentencePieceModel& model) {
  Message message(bytes, model.name);
  while (const auto field = message.next()) {
    if (field->number == 3) model.model_type = number_in(message, *field);
    if (field->number == 24) model.space_as_suffix = flag_in(message, *field);
    if (field->number == 35) model.byte_fallback = flag_in(message, *field);
    if (field->number == 41) model.bos = number_in(message, *field);
    if (field->number == 42) model.eos = number_in(message, *field);
  }
}

void read_normalizer_spec(std::string_view bytes, SentencePieceModel& model) {
  Message message(bytes, model.name);
  while (const auto field = message.next()) {
    if (field->number == 1) model.normalizer = bytes_in(message, *field);
    if (field->number == 2) model.has_charsmap = !bytes_in(message, *field).empty();
    if (field->number == 3) model.add_dummy_prefix = flag_in(message, *field);
    if (field->number == 4) model.remove_extra_whitespaces = flag_in(message, *field);
    if (field->number == 5) model.escape_whitespaces = flag_in(message, *field);
  }
}

void read_denormalizer_spec(std::string_view bytes, SentencePieceModel& model) {
  Message message(bytes, model.name);
  while (const auto field = message.next())
    if (field->number == 2) model.has_denormalizer = !bytes_in(message, *field).empty();
}

}  // namespace

SentencePieceModel parse_sentencepiece(std::string_view bytes, std::string_view name) {
  SentencePieceModel model{.name = std::string(name)};
  Message message(bytes, model.name);
  while (const auto field = message.next()) {
    if (field->number == 1) read_piece_fields(bytes_in(message, *field), model);
    if (field->number == 2) read_trainer_spec(bytes_in(message, *field), model);
    if (field->number == 3) read_normalizer_spec(bytes_in(message, *field), model);
    if (field->number == 5) read_denormalizer_spec(bytes_in(message, *field), model);
  }
  if (model.pieces.empty()) fail("{}: no pieces: not a tokenizer.model of SentencePiece", name);
  return model;
}

PieceVocabulary vocabulary_of(const SentencePieceModel& model) {
  const auto refuse = [&](std::string_view what) {
    fail_as(ErrorKind::kUnsupported, "{}: {} is not read", model.name, what);
  };
  constexpr std::string_view kTypes[] = {"unigram", "bpe", "word", "char"};
  if (model.model_type != 2)
    refuse(text("a SentencePiece model of type {}, not bpe,",
                model.model_type >= 1 && model.model_type <= 4
                    ? text("\"{}\"", kTypes[static_cast<size_t>(model.model_type - 1)])
                    : text("{}", model.model_type)));
  if (model.has_charsmap) refuse(text("the normalizer \"{}\", not identity,", printable(model.normalizer)));
  if (model.has_denormalizer) refuse("a denormalizer");
  if (!model.escape_whitespaces) refuse("escape_whitespaces false");
  if (model.space_as_suffix) refuse("treat_whitespace_as_suffix");
  const auto is = [](int32_t type, PieceType other) { return type == static_cast<int32_t>(other); };
  PieceVocabulary out{.name = model.name,
                      .pieces = model.pieces,
                      .scores = model.scores,
                      .types = model.types,
                      .byte_fallback = model.byte_fallback,
                      .add_prefix = model.add_dummy_prefix,
                      .collapse_spaces = model.remove_extra_whitespaces};
  for (size_t i = 0; i < model.pieces.size(); ++i) {
    if (is(model.types[i], PieceType::kUnknown)) {
      if (out.unknown) fail("{}: pieces {} and {} are both the unknown one", model.name, *out.unknown, i);
      out.unknown = static_cast<TokenId>(i);
    }
    // sentencepiece would leave such spaces as they are, and then not find the piece.
    if (out.collapse_spaces && is(model.types[i], PieceType::kUserDefined) &&
        model.pieces[i].find(' ') != std::string::npos)
      refuse(text("remove_extra_whitespaces with the user-defined piece \"{}\"", printable(model.pieces[i])));
  }
  if (!out.unknown) fail("{}: no piece is the unknown one", model.name);
  return out;
}

Tokenizer Tokenizer::from_sentencepiece(std::string_view bytes, std::string_view name,
                                        const SentencePieceExtras& extras) {
  const SentencePieceModel model = parse_sentencepiece(bytes, name);
  PieceVocabulary vocabulary = vocabulary_of(model);
  const auto begin_or_end = [&](bool adds, int32_t id) {
    const bool exists = id >= 0 && static_cast<size_t>(id) < model.pieces.size();
    return adds && exists ? std::optional<TokenId>(id) : std::nullopt;
  };
  vocabulary.added = extras.added;
  vocabulary.add_bos = begin_or_end(extras.add_bos, model.bos);
  vocabulary.add_eos = begin_or_end(extras.add_eos, model.eos);
  return Tokenizer(parts_of(vocabulary));
}

}  // namespace kt::inline texts
