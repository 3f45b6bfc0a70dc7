// The carts of pole.cpp as they are shipped: a policy that was exported to ONNX pushes them, and nothing is connected.
//
//   ./shipped pole.onnx [EPISODES]
#include "cart.hpp"

#include <onnxruntime_c_api.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <random>
#include <stdexcept>
#include <string>

namespace {

const OrtApi *const ort = OrtGetApiBase()->GetApi(ORT_API_VERSION);

void check(OrtStatus *status) {
  if (!status) return;
  const std::string message = ort->GetErrorMessage(status);
  ort->ReleaseStatus(status);
  throw std::runtime_error(message);
}

// A policy in a file of `penstock export`. It lives as long as the program, so nothing is released.
class Policy {
 public:
  explicit Policy(const std::string &path) {
    OrtEnv *environment;
    OrtSessionOptions *options;
    OrtMemoryInfo *memory;
    check(ort->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "shipped", &environment));
    check(ort->CreateSessionOptions(&options));
    check(ort->SetIntraOpNumThreads(options, 1));  // one observation is no work for several
    check(ort->CreateSession(environment, std::filesystem::path(path).c_str(), options, &session_));
    check(ort->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));
    const std::array<std::int64_t, 2> shape = {1, 4};
    check(ort->CreateTensorWithDataAsOrtValue(memory, seen_.data(), sizeof seen_, shape.data(), shape.size(),
                                              ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, &input_));
  }

  std::int64_t decide(const std::array<float, 4> &seen) {
    const std::array<const char *, 1> inputs = {"obs"}, outputs = {"action"};
    OrtValue *output = nullptr;
    void *action;
    seen_ = seen;
    check(ort->Run(session_, nullptr, inputs.data(), &input_, 1, outputs.data(), 1, &output));
    check(ort->GetTensorMutableData(output, &action));
    const std::int64_t decided = *static_cast<std::int64_t *>(action);
    ort->ReleaseValue(output);
    return decided;
  }

 private:
  std::array<float, 4> seen_{};  // the memory of input_
  OrtSession *session_;
  OrtValue *input_;
};

}  // namespace

int main(int count, char **arguments) {
  if (count < 2 || !ort) {
    std::cerr << (ort ? "usage: shipped POLICY.onnx [EPISODES]\n"
                      : "this ONNX Runtime is older than the header that the game was built with\n");
    return 2;
  }
  try {
    Policy policy(arguments[1]);
    const long episodes = count > 2 ? std::stol(arguments[2]) : 20;
    std::mt19937 random{std::random_device{}()};
    Cart cart;
    long steps = 0;
    for (long episode = 0; episode < episodes; episode++) {
      cart.reset(random);
      while (!cart.has_fallen() && cart.steps < MOST_STEPS) cart.push(policy.decide(cart.seen()) == 1 ? PUSH : -PUSH);
      steps += cart.steps;
    }
    std::printf("%ld episodes of %.1f steps\n", episodes, static_cast<double>(steps) / static_cast<double>(episodes));
  } catch (const std::exception &error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
