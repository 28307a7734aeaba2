// Rows of datasets as conversations, for what kt itself does with them. Reads what kt_kernel/sft/train/rows.py reads,
// and drops what that drops, in the same words.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/sft/datasets.h"
#include "text/json.h"

namespace kt::inline cli {

struct Row {
  std::string file;
  int64_t number = 0;  // from 1, of the rows in the file
  OrderedJson
      messages;  // {"role", "content"} and perhaps "tool_calls"; of pairs and judged answers those before the answer
  OrderedJson tools = nullptr;
  // Of pairs and of judged answers; null for others.
  OrderedJson chosen = nullptr, rejected = nullptr, answer = nullptr;
  bool wanted = true;             // of a judged answer
  OrderedJson choices = nullptr;  // the column of that name, if there is one
};

// Rows that are no examples, by the reason.
class DroppedRows {
 public:
  void add(const std::string& file, int64_t number, const std::string& reason);
  size_t count() const;
  // "pirate.jsonl: 3 rows dropped, without an assistant turn: 4, 9, 17", in the order of the first ones.
  std::vector<std::string> lines() const;

 private:
  struct Reason {
    std::string file, why;
    std::vector<int64_t> numbers;
  };
  std::vector<Reason> reasons_;
};

// Those of a dataset, `most` and TrainingRows::most of them if above 0; `system` goes before conversations without a
// system message. Error naming file and row where a file is not what it should be.
std::vector<Row> read_rows(const TrainingRows& source, int64_t most, const std::string& system,
                           DroppedRows& dropped);

// The rows that val_size holds back from training, in the order they have: the same that kt_kernel.sft holds back. A
// share below 1, or how many. Error for all of them, naming `place`.
std::vector<Row> held_rows(std::vector<Row> rows, double size, uint32_t seed, const std::string& place);

}  // namespace kt::inline cli
