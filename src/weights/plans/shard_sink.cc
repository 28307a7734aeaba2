#include "weights/plans/shard_sink.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "base/file.h"
#include "base/sha256.h"

namespace kt::inline weights {
namespace {

namespace fs = std::filesystem;

class FileSink : public ShardSink {
 public:
  FileSink(const std::string& output, const ShardPlan& shard)
      : name_(shard.file), writer_(output + "/" + shard.file, shard.tensors, shard.metadata) {}
  void write(size_t tensor, uint64_t offset, std::span<const std::byte> bytes) override {
    writer_.write(tensor, offset, bytes);
  }
  std::vector<WrittenFile> digest() override { return {{name_, writer_.size(), writer_.digest()}}; }
  void commit() override { writer_.commit(); }

 private:
  std::string name_;
  SafetensorsWriter writer_;
};

// A folder of many small files. It is filled under another name, made durable with one sync of the file
// system (one for each of up to 100,000 files would take hours) and renamed as a whole.
class FolderSink : public ShardSink {
 public:
  FolderSink(const std::string& output, const ShardPlan& shard)
      : shard_(shard),
        final_(fs::path(output) / shard.file),
        filling_(final_.string() + text(".{}-0.tmp", getpid())) {
    make_folder(final_.parent_path());
    std::error_code code;
    if (!fs::create_directory(filling_, code))  // ours alone: nothing that was there before is written into
      fail_as(write_error_kind(code.value()), "{}: cannot create the folder: {}", filling_.string(),
              code ? code.message() : "it is there");
    for (const TensorSpec& file : shard.tensors) make_folder(path_of(file).parent_path());
  }
  ~FolderSink() override {
    std::error_code ignored;
    if (!committed_) fs::remove_all(filling_, ignored);
  }

  void write(size_t tensor, uint64_t offset, std::span<const std::byte> bytes) override {
    const std::string path = path_of(shard_.tensors.at(tensor)).string();
    const Descriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666));
    if (file.get() < 0)
      fail_as(write_error_kind(errno), "{}: cannot create: {}", path, std::generic_category().message(errno));
    bool touched = false;
    for (size_t at = 0; at < bytes.size();) {
      const ssize_t wrote =
          pwrite(file.get(), bytes.data() + at, bytes.size() - at, static_cast<off_t>(offset + at));
      if (wrote < 0 && may_write_again(bytes.subspan(at), touched)) continue;
      if (wrote <= 0)
        fail_as(write_error_kind(wrote < 0 ? errno : ENOSPC), "{}: cannot write {} bytes: {}", path,
                bytes.size(), std::generic_category().message(wrote < 0 ? errno : ENOSPC));
      at += static_cast<size_t>(wrote);
    }
  }

  std::vector<WrittenFile> digest() override {
    std::vector<WrittenFile> out;
    for (const TensorSpec& file : shard_.tensors) {
      const MappedFile mapped(path_of(file).string());
      KT_CHECK(mapped.size() == byte_count(file), "{}: {} bytes written, {} planned", file.name,
               mapped.size(), byte_count(file));
      Sha256 sum;
      sum.add(mapped.bytes());
      out.push_back({file.name, mapped.size(), sum.hex()});
    }
    return out;
  }

  void commit() override {
    const Descriptor folder(open(filling_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (folder.get() < 0 || syncfs(folder.get()) != 0)
      fail_as(write_error_kind(errno), "{}: cannot sync: {}", filling_.string(),
              std::generic_category().message(errno));
    std::error_code code;
    fs::remove_all(final_, code);
    if (!code) fs::rename(filling_, final_, code);
    if (code) fail("{}: cannot replace: {}", final_.string(), code.message());
    committed_ = true;
    const Descriptor parent(open(final_.parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (parent.get() >= 0 && fsync(parent.get()) != 0 && errno != EINVAL)
      fail("{}: cannot sync its folder: {}", final_.string(), std::generic_category().message(errno));
  }

 private:
  // A file's name starts with the shard's folder.
  fs::path path_of(const TensorSpec& file) const {
    return filling_ / fs::path(file.name).lexically_relative(shard_.file);
  }

  const ShardPlan& shard_;
  fs::path final_, filling_;
  bool committed_ = false;
};

}  // namespace

ErrorKind write_error_kind(int code) {
  return code == ENOSPC || code == EDQUOT || code == EFBIG ? ErrorKind::kMemory : ErrorKind::kInput;
}

void make_folder(const fs::path& path) {
  std::error_code code;
  fs::create_directories(path, code);
  if (code)
    fail_as(write_error_kind(code.value()), "{}: cannot create the folder: {}", path.string(),
            code.message());
}

std::unique_ptr<ShardSink> open_shard(const std::string& output, const ShardPlan& shard) {
  if (shard.folder) return std::make_unique<FolderSink>(output, shard);
  return std::make_unique<FileSink>(output, shard);
}

uint64_t shard_bytes(const ShardPlan& shard) {
  uint64_t bytes = shard.folder ? 0 : safetensors_header(shard.tensors, shard.metadata).size();
  for (const TensorSpec& tensor : shard.tensors) bytes += byte_count(tensor);
  return bytes;
}

}  // namespace kt::inline weights
