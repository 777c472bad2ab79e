-- Registers leases again that Redis may have lost.   ARGV[4] and further: the leases.

for i = 4, #ARGV do hold(account, ARGV[i]) end
save(account)
return answer(1, account)
