#include "engine/calibration/sample_sources.h"

#include <algorithm>
#include <optional>
#include <random>
#include <unordered_map>

#include "base/error.h"
#include "engine/calibration/document_tokens.h"
#include "engine/calibration/sample_rows.h"
#include "engine/calibration/text_file.h"

namespace kt::inline engine {
namespace {

std::vector<TextFile> opened(const DatasetFiles& files) {
  std::vector<TextFile> out;
  for (const std::string& path : files.paths) out.emplace_back(path);
  return out;
}

class RowSource : public SampleSource {
 public:
  RowSource(const DatasetFiles& files, const DescribedModel& model) : files_(opened(files)), rows_(model) {
    TextLine line;
    for (size_t f = 0; f < files_.size(); ++f) {
      TextLineReader reader(files_[f]);
      for (size_t i = 0; reader.next(line); ++i, ++count_)
        if (i % kMarkEvery == 0) marks_.push_back({count_, f, line.offset, line.number});
    }
  }

  size_t count() const override { return count_; }

  void read(std::span<const size_t> numbers, Visit each) override {
    std::optional<TextLineReader> reader;
    TextLine line;
    size_t at = 0, end = 0;  // row that the reader stands at, and the next mark's
    for (const size_t number : numbers) {
      const auto next = std::ranges::upper_bound(marks_, number, {}, &Mark::row);
      const Mark& mark = *(next - 1);
      if (number >= end) {
        reader.emplace(files_[mark.file], mark.offset, mark.line);
        at = mark.row;
        end = next == marks_.end() ? count_ : next->row;
      }
      do
        if (!reader->next(line)) fail("{}: changed while it was read", files_[mark.file].path());
      while (at++ < number);
      const std::string place = text("{} line {}", files_[mark.file].path(), line.number);
      each(number, rows_.tokens(line.text, place), place);
    }
  }

 private:
  static constexpr size_t kMarkEvery = 64;
  struct Mark {
    size_t row, file;
    uint64_t offset;
    size_t line;
  };
  std::vector<TextFile> files_;
  SampleRows rows_;
  std::vector<Mark> marks_;
  size_t count_ = 0;
};

class StretchSource : public SampleSource {
 public:
  StretchSource(const DatasetFiles& files, const DescribedModel& model, size_t length)
      : files_(opened(files)),
        length_(length),
        stream_(model.tokenizer(), files_, document_end(model, files.paths.front())) {
    for (DocumentTokens::Mark mark = stream_.mark();; mark = stream_.mark()) {
      if (marks_.empty() || mark.file != marks_.back().file ||
          mark.offset >= marks_.back().offset + kMarkEvery)
        marks_.push_back(mark);
      if (!stream_.next()) break;
    }
    tokens_ = stream_.mark().tokens;
  }

  size_t count() const override { return (tokens_ + length_ - 1) / length_; }

  void read(std::span<const size_t> numbers, Visit each) override {
    for (const size_t number : numbers) {
      const size_t first = number * length_, end = std::min(first + length_, tokens_);
      const DocumentTokens::Mark& mark =
          *(std::ranges::upper_bound(marks_, first, {}, &DocumentTokens::Mark::tokens) - 1);
      if (stream_.first() > first || stream_.mark().tokens < mark.tokens) stream_.seek(mark);
      std::vector<TokenId> tokens;
      std::string place;
      while (first + tokens.size() < end) {
        const size_t at = first + tokens.size() - stream_.first(), size = stream_.tokens().size();
        if (at >= size) {
          if (!stream_.next()) fail("{}: changed while it was read", files_.back().path());
          continue;
        }
        if (place.empty()) place = text("{} byte {}", files_[stream_.file()].path(), stream_.offset());
        const auto from = stream_.tokens().begin() + static_cast<ptrdiff_t>(at);
        tokens.insert(tokens.end(), from,
                      from + static_cast<ptrdiff_t>(std::min(size - at, end - first - tokens.size())));
      }
      if (tokens.size() < 2) tokens.clear();
      each(number, std::move(tokens), place);
    }
  }

 private:
  static constexpr uint64_t kMarkEvery = uint64_t{64} << 10;
  std::vector<TextFile> files_;
  size_t length_;
  DocumentTokens stream_;
  std::vector<DocumentTokens::Mark> marks_;
  size_t tokens_ = 0;
};

}  // namespace

std::unique_ptr<SampleSource> open_samples(const DatasetFiles& files, const DescribedModel& model,
                                           int length) {
  if (files.kind == DatasetKind::kRows) return std::make_unique<RowSource>(files, model);
  return std::make_unique<StretchSource>(files, model, static_cast<size_t>(length));
}

// Fisher-Yates by hand, since libraries differ in theirs, of a list that holds what is not in its place.
struct SampleDraw::State {
  size_t count = 0, drawn = 0;
  std::mt19937_64 random;
  std::unordered_map<size_t, size_t> moved = {};
};

SampleDraw::SampleDraw(size_t count, uint64_t seed)
    : state_(std::make_unique<State>(State{.count = count, .random = std::mt19937_64(seed)})) {}
SampleDraw::~SampleDraw() = default;

std::vector<size_t> SampleDraw::next(size_t most) {
  State& s = *state_;
  const auto at = [&](size_t place) {
    const auto found = s.moved.find(place);
    return found == s.moved.end() ? place : found->second;
  };
  std::vector<size_t> out;
  for (; out.size() < most && s.drawn < s.count; ++s.drawn) {
    const size_t other = s.drawn + s.random() % (s.count - s.drawn);
    out.push_back(at(other));
    s.moved[other] = at(s.drawn);
    s.moved.erase(s.drawn);
  }
  std::ranges::sort(out);
  return out;
}

}  // namespace kt::inline engine
