// classify WEIGHTS IMAGE...: the five most likely classes of each image.
#include <cstdio>

#include "violin/error.h"
#include "violin/predict/predictor.h"

int main(int argc, char** argv) {
  try {
    if (argc < 3) throw violin::Error("usage: classify WEIGHTS IMAGE...");
    const violin::Predictor predictor(argv[1]);
    for (int i = 2; i < argc; ++i) {
      std::printf("%s\n", argv[i]);
      for (const violin::Guess& guess : predictor.classify_file(argv[i]))
        std::printf("  %5.1f%%  %s\n", 100 * guess.probability, guess.name.c_str());
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "classify: %s\n", error.what());
    return 1;
  }
}
