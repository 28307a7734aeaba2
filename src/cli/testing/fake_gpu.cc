// A driver for tests: the functions of libcuda and libnvidia-ml that kt doctor asks, for two GPUs, the second
// on half of its lanes. KT_FAKE_GPU=broken: a driver that does not start.
#include <cstddef>
#include <cstdlib>
#include <cstring>

extern "C" {

int cuInit(unsigned) {
  const char* mode = std::getenv("KT_FAKE_GPU");
  return mode && std::strcmp(mode, "broken") == 0 ? 999 : 0;
}
int cuDriverGetVersion(int* version) {
  *version = 12060;
  return 0;
}
int cuDeviceGetCount(int* count) {
  *count = 2;
  return 0;
}
int cuDeviceGet(int* device, int index) {
  *device = index + 10;
  return 0;
}
int cuDeviceGetName(char* name, int size, int device) {
  std::strncpy(name, device == 10 ? "Fake A" : "Fake B", static_cast<size_t>(size));
  return 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int) {
  *bytes = size_t{24} << 30;
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 75 ? 8 : attribute == 76 ? 9 : attribute == 16 ? 100 : 0;  // 17: it shows no screen
  return 0;
}

int nvmlInit_v2() { return 0; }
int nvmlShutdown() { return 0; }
int nvmlSystemGetDriverVersion(char* version, unsigned size) {
  std::strncpy(version, "560.35.03", size);
  return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
  static int handles[2] = {0, 1};
  *handle = &handles[index];
  return 0;
}
int nvmlDeviceGetMemoryInfo(void*, unsigned long long* bytes) {
  bytes[0] = 24ull << 30;
  bytes[1] = 20ull << 30;
  bytes[2] = 4ull << 30;
  return 0;
}
int nvmlDeviceGetCurrPcieLinkWidth(void* handle, unsigned* width) {
  *width = *static_cast<int*>(handle) == 0 ? 16 : 8;
  return 0;
}
int nvmlDeviceGetMaxPcieLinkWidth(void*, unsigned* width) {
  *width = 16;
  return 0;
}
int nvmlDeviceGetCurrPcieLinkGeneration(void*, unsigned* generation) {
  *generation = 1;
  return 0;
}
int nvmlDeviceGetMaxPcieLinkGeneration(void*, unsigned* generation) {
  *generation = 4;
  return 0;
}

}  // extern "C"
