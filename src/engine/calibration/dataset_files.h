// Which files a dataset consists of: one that is named, or those of a snapshot in the local hub cache.
// Nothing is downloaded.
#pragma once
#include <string>
#include <vector>

namespace kt::inline engine {

struct DatasetRequest {
  std::string dataset;  // FILE.jsonl, FILE.json (a row a line too), FILE.txt, or a name: "org/name" or "name"
  std::string option = "dataset";  // what messages call it
  std::string split;               // of a hub dataset; empty: all
  bool parquet = false;            // .parquet files are found too, for a reader of their own
};

enum class DatasetKind {
  kRows,
  kDocuments,
  kTables
};  // JSON, a line each; text between separators; .parquet

struct DatasetFiles {
  DatasetKind kind = DatasetKind::kRows;
  std::vector<std::string> paths;  // sorted
  std::vector<std::string> names;  // the same as reports name them: as given, or within the snapshot
  std::string revision;            // of a hub dataset
};

// Of a snapshot (refs/main's, or else the newest), what the split names: the .jsonl files; without them
// .json, or else .txt, unless there is .parquet, which is not read. Hidden files, licences, read-mes and
// their like are no data. A split is named by whole words of a path: "train" by train-00000-of-00002.jsonl
// and train/0.jsonl, not by train_sft.jsonl or constraints.jsonl.
//
// Errors: a file that is missing or of another kind (kUnsupported for .parquet, with what reads it), a name
// that is not in the cache (says where it looked and what to pass), a split that no file has (lists files).
DatasetFiles find_dataset(const DatasetRequest& request);

// By its name's end: .jsonl and .json are rows, .parquet are tables.
DatasetKind dataset_kind(const std::string& path);

}  // namespace kt::inline engine
