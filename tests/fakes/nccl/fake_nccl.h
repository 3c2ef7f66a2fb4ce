// What tests tell the fake libnccl (fake_nccl.cpp).  All functions may be called from any thread; Python reaches them
// by ctypes.
//
// Work is put on streams.  A test's device registers how: `enqueue(stream, step, argument)` puts something on the
// stream that is finished when step(argument) has returned true.  A step that returns false waits for its peers: the
// stream asks again later and runs nothing behind it meanwhile.  The data of a collective moves when the last rank's
// stream has reached its part.  On a null stream, or without `enqueue`, a part is reached at once.
#pragma once

#include <stdbool.h>

extern "C" {

void fakeNcclSetEnqueue(void (*enqueue)(void* stream, bool (*step)(void*), void* argument));
// The calling thread's current device, which a communicator is made for; without it rank r has device r.  And how to
// set it: as the real ones do, the ends of communicators and of groups set it back to what they found, which makes a
// context.
void fakeNcclSetCurrentDevice(int (*current_device)(void), void (*set_device)(int));

// The nth next call of an operation ("AllReduce", "GroupEnd", "CommInitRankConfig", ...) returns `code`.  nth = 1: the
// next.
void fakeNcclFail(const char* operation, int nth, int code);
// The init of that rank ends with `code`, in the background, as a broken network's would.
void fakeNcclFailInit(int rank, int code);
// The asynchronous error of that rank's communicators, of all teams.
void fakeNcclAsync(int rank, int code);
// While on, that rank's streams do not reach their parts: a peer that never comes.
void fakeNcclHold(int rank, bool on);
// While on, calls of that operation do not return: a launch blocks before its group is complete.
void fakeNcclBlock(const char* operation, bool on);
// How many rounds of 0.1 ms a launch or an init blocks; 0 at first.
void fakeNcclSetRounds(int rounds);
// A part that has waited so long ends with an asynchronous error (real NCCL waits for ever); 20 seconds at first.
void fakeNcclSetTimeout(int milliseconds);

// Calls so far, of an operation.
long fakeNcclCalls(const char* operation);
// Communicators that were made, and neither destroyed nor aborted.
int fakeNcclAlive(void);
int fakeNcclAborted(void);
// Whether NCCL_P2P_DISABLE was 1 at the first communicator of the process; -1: there was none.
int fakeNcclP2pDisabled(void);
// Groups that are open in the calling thread.
int fakeNcclDepth(void);
// Forgets injected failures and counts, and lets all ranks go on.
void fakeNcclReset(void);

}  // extern "C"
