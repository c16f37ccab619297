// The curve library alone: no torch on the link line.
#include <iostream>

#include "violin/curves/curves.h"

int main() {
  namespace curves = violin::curves;
  const auto ranks = curves::ranks(curves::parse_curve("hilbert"), curves::parse_grid("4x4"));
  std::cout << "last cell of hilbert on 4x4: " << curves::order(*ranks).back() << "\n";
}
