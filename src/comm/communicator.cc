#include "treeline/comm.h"

namespace treeline {

void Communicator::Exchange(ConstBytes send, int to, Bytes receive, int from) {
  Start({.send = {&send, 1}, .to = to, .receive = receive, .from = from})->Wait();
}

}  // namespace treeline
